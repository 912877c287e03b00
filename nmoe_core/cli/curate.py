"""`nmoe curate`: reorder a JSONL file, and inspect an order and its embeddings.

The published tool `nmoe curate` has the same flags. Without `--order`, `--seq-len` is taken as the
training sequence length, and the order fills windows of that length; without both flags, the order
suits any length.
"""

import argparse
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from nmoe_core.cli import preview
from nmoe_core.cli.flags import number
from nmoe_core.cli.output import add_verb, print_facts, print_table

_SEQ_LEN = 131_072
_FLAGS: dict[str, dict[str, Any]] = {
    "input": {"type": Path, "metavar": "JSONL"},
    "model-dir": {"type": Path, "help": "checkpoint: embedding table, tokenizer"},
    "n-clusters": {"type": number(1), "default": 30, "metavar": "K"},
    "seq-len": {"type": number(1), "metavar": "TOKENS", "help": f"default {_SEQ_LEN}"},
    "text-field": {"default": "text"},
    "load-embeddings": {"type": Path, "metavar": "NPY", "help": "use these embeddings instead"},
    "pca-components": {"type": number(0), "default": 0, "metavar": "N", "help": "0: no PCA"},
    "no-plot": {"action": "store_true", "help": "draw no pictures"},
    "seed": {"type": number(0), "default": 42},
    "tokenizer": {"metavar": "NAME", "help": "a tiktoken encoding"},
    "full-width": {
        "action": "store_true",
        "help": "keep the table's width instead of projecting to 256",
    },
    "on-error": {
        "choices": ("fail", "set-aside"),
        "default": "fail",
        "help": "if lines are not records: refuse the file, or write them to *_set_aside.jsonl "
        "and replace loaded embeddings that are not finite by zeros",
    },
}
_OF_FILE = ("n-clusters", "seq-len", "text-field", "load-embeddings", "pca-components", "no-plot")
_OF_FILE += ("seed", "tokenizer", "full-width", "on-error")
_VERDICTS = {
    "redundant": "ARI above 0.7: both embeddings find the same clusters",
    "moderate": "ARI 0.3 to 0.7: the clusters differ in part",
    "different": "ARI below 0.3: the clusters differ widely; try deep embeddings",
}


def register(verbs: Any) -> None:
    text = "order documents so that every window is diverse"
    curate = add_verb(verbs, "curate", run_curate, text)
    curate.description = __doc__
    curate.add_argument("--json", action="store_true", help="print JSON")
    _add_file_flags(curate, is_required=False)
    curate.add_argument("--stats-only", action="store_true", help="print statistics, write no file")
    curate.add_argument(
        "--calibrate-k", action="store_true", help="same as `nmoe curate calibrate-k`"
    )
    curate.add_argument(
        "--order",
        metavar="NAME",
        help="order (default: auto, the most diverse of three, with --seq-len; else golden)",
    )
    curate.add_argument(
        "--loader",
        choices=("concat", "flush"),
        default="concat",
        help="how the loader will fill windows",
    )
    curate.add_argument("--token-counts", type=Path, metavar="NPY", help="default: beside --input")
    curate.add_argument(
        "--refit", action="store_true", help="fit new clusters instead of reusing the old ones"
    )
    curate.set_defaults(parser=curate)
    parts = curate.add_subparsers(dest="part", metavar="PART", required=False)
    text = "recommend a number of clusters"
    calibrate = add_verb(parts, "calibrate-k", find_k, text, _show_k)
    _add_file_flags(calibrate, is_required=True)
    _add_embed(parts)
    _add_compare(parts)
    _add_animate(parts)
    preview.register_curation(parts)


def _add(parser: argparse.ArgumentParser, *names: str, **more: Any) -> None:
    """Add flags by their names in `_FLAGS`."""
    for name in names:
        parser.add_argument(f"--{name}", **_FLAGS[name] | more)


def _add_file_flags(parser: argparse.ArgumentParser, *, is_required: bool) -> None:
    _add(parser, "input", "model-dir", required=is_required)
    text = "output file (calibrate-k reuses its embeddings; default {input}_curated.jsonl)"
    parser.add_argument("--output", type=Path, metavar="JSONL", help=text)
    _add(parser, *_OF_FILE)
    parser.add_argument(
        "--gpu", type=int, default=0, help="ignored: shallow embedding needs no GPU"
    )


def _add_embed(parts: Any) -> None:
    text = "compute deep embeddings: the model's last hidden state"
    embed = add_verb(parts, "embed", run_embed, text, _show_embedded)
    _add(embed, "input", "model-dir", required=True)
    embed.add_argument("--output", type=Path, required=True, metavar="NPY")
    embed.add_argument("--batch-size", type=number(1), default=32, help="maximum records per batch")
    embed.add_argument(
        "--batch-tokens", type=number(1), default=16_384, help="maximum padded tokens per batch"
    )
    embed.add_argument(
        "--max-tokens", type=number(1), help="embed only the first N tokens of a record"
    )
    embed.add_argument(
        "--limit", type=number(1), metavar="N", help="embed only the first N records"
    )
    embed.add_argument(
        "--reverse", action="store_true", dest="is_reverse", help="longest records first"
    )
    embed.add_argument("--device", "--devices", nargs="+", dest="devices")
    embed.add_argument("--gpu", type=int, help="same as --device cuda:GPU")
    embed.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    embed.add_argument(
        "--tp", type=int, default=1, dest="tensor_parallel", help="refused: use --devices"
    )
    _add(embed, "text-field", "tokenizer", "on-error")


def _add_compare(parts: Any) -> None:
    text = "compare the clusters of two embeddings"
    compare = add_verb(parts, "compare", run_compare, text, _show_comparison)
    compare.add_argument("--shallow", type=Path, required=True, metavar="NPY")
    compare.add_argument("--deep", type=Path, required=True, metavar="NPY")
    compare.add_argument(
        "--pca-deep-only", type=number(0), default=0, help="apply PCA to the --deep embeddings only"
    )
    compare.add_argument("--plot", type=Path, metavar="PNG")
    _add(compare, "n-clusters", "pca-components", "seed")


def _add_animate(parts: Any) -> None:
    text = "make a film of the order (MP4 with ffmpeg or imageio-ffmpeg, else GIF)"
    animate = add_verb(parts, "animate", run_animate, text, lambda paths: print(*paths, sep="\n"))
    animate.add_argument("--embeddings", type=Path, required=True, metavar="NPY")
    animate.add_argument("--token-counts", type=Path, required=True, metavar="NPY")
    animate.add_argument(
        "--umap", type=Path, metavar="NPY", help="file with the documents' 2-D points"
    )
    animate.add_argument("--labels", type=Path, metavar="NPY", help="default: beside --embeddings")
    animate.add_argument("--order", type=Path, metavar="NPY", help="default: beside --embeddings")
    animate.add_argument("--output", type=Path, default=Path("ordering_animation.mp4"))
    animate.add_argument(
        "--frames", type=number(1), help="number of frames (default 600; 120 for GIF)"
    )
    _add(animate, "n-clusters", "seed")
    _add(animate, "seq-len", default=_SEQ_LEN)


def run_curate(arguments: argparse.Namespace) -> int:
    """Reorder a file, or only measure its order."""
    needed = ("input", "model_dir") if arguments.calibrate_k else ("input", "output", "model_dir")
    missing = [f"--{n.replace('_', '-')}" for n in needed if getattr(arguments, n) is None]
    if missing:
        arguments.parser.error(f"the following arguments are required: {', '.join(missing)}")
    if arguments.calibrate_k:
        return print_facts(find_k(arguments), arguments.json, _show_k)
    from nmoe_core.curate.jsonl.run import curate_file

    facts = curate_file(
        *_named(arguments), stats_only=arguments.stats_only, plot=not arguments.no_plot
    )
    status = print_facts(facts, arguments.json, _show_curated)
    if not arguments.json and not arguments.stats_only:
        print(f"\n{facts['output']}")
    return status


def find_k(arguments: argparse.Namespace) -> Any:
    """Measure silhouette and reachable diversity for each k; print them with the k that each of two
    rules recommends."""
    from nmoe_core.curate.jsonl.run import calibrate_file

    return calibrate_file(*_named(arguments), plot=not arguments.no_plot)


def _show_k(found: Any) -> None:
    names = ("k", "silhouette", "reachable", "smallest", "median", "largest")
    print_table(names, [[getattr(row, name) for name in names] for row in found.results])
    print(f"\nwithin 5 % of the peak silhouette (published rule): k = {found.within_5pct}")
    print(f"windows hold 95 % of the clusters, silhouette >= 70 % of peak: k = {found.reachable}")
    if not found.has_groups:
        print("no groups found: the clusters separate hardly better than those of a normal cloud")


def run_embed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Embed with the whole model; a second run continues after an interrupted run."""
    from nmoe_core.curate.jsonl.deep import DeepSettings, embed_deep

    if arguments.devices is None and arguments.gpu is not None:
        arguments.devices = [f"cuda:{arguments.gpu}"]
    values = {field.name: getattr(arguments, field.name) for field in fields(DeepSettings)}
    values["devices"] = tuple(arguments.devices) if arguments.devices else None
    named = arguments.input, arguments.output, arguments.model_dir
    return embed_deep(*named, DeepSettings(**values))


def _show_embedded(facts: dict[str, Any]) -> None:
    print(
        f"{facts['output']}: {facts['num_records']:,} rows of width {facts['width']:,}, "
        f"{facts['embedded_now']:,} embedded now on {', '.join(facts['devices'])}, "
        f"{facts['num_truncated']:,} of more than {facts['max_tokens']:,} tokens cut"
    )


def run_compare(arguments: argparse.Namespace) -> Any:
    """Measure the agreement of two embeddings and of their clusters."""
    from nmoe_core.curate.diversity.compare import compare_embeddings, open_array

    found = compare_embeddings(
        open_array(arguments.shallow, "f", None, None),
        open_array(arguments.deep, "f", None, None),
        arguments.n_clusters,
        arguments.seed,
        pca_shallow=arguments.pca_components,
        pca_deep=arguments.pca_deep_only or arguments.pca_components,
    )
    if arguments.plot is not None:
        from nmoe_core.base.atomic import replacing, write_bytes
        from nmoe_core.curate.pictures import compared_picture

        picture = compared_picture(found, arguments.seed)
        with replacing(arguments.plot):
            write_bytes(arguments.plot, picture)
    return found.comparison


def _show_comparison(found: Any) -> None:
    figures = [[key, value] for key, value in asdict(found).items() if key != "verdict"]
    print_table(("figure", "value"), figures)
    print(f"\n{found.verdict}: {_VERDICTS[found.verdict]}")


def run_animate(arguments: argparse.Namespace) -> list[str]:
    """Write the animations; return their paths."""
    from nmoe_core.curate.pictures import FilmFiles, animate

    named = arguments.embeddings, arguments.token_counts
    others = {"points": arguments.umap, "labels": arguments.labels, "order": arguments.order}
    made = animate(
        FilmFiles(*named, **others),
        arguments.output,
        num_clusters=arguments.n_clusters,
        seq_len=arguments.seq_len,
        num_frames=arguments.frames,
        seed=arguments.seed,
    )
    return [str(path) for path in made]


def _named(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Paths and settings from the command line; settings without a flag of this verb keep their
    defaults."""
    from nmoe_core.curate.jsonl.compute import JsonlSettings
    from nmoe_core.curate.jsonl.record_files import JsonlPaths

    given = vars(arguments)
    values = {f.name: given[f.name] for f in fields(JsonlSettings) if f.name in given}
    order = given.get("order") or ("auto" if arguments.seq_len else "golden")
    values |= {"order": order.replace("-", "_"), "seq_len": arguments.seq_len or _SEQ_LEN}
    values |= {"max_width": 0} if arguments.full_width else {}
    stem = arguments.input.name.partition(".jsonl")[0]
    output = arguments.output or arguments.input.with_name(f"{stem}_curated.jsonl")
    named = arguments.input, output, arguments.model_dir, arguments.load_embeddings
    return JsonlPaths(*named, given.get("token_counts")), JsonlSettings(**values)


def _show_curated(facts: dict[str, Any]) -> None:
    counts = facts["counts"]
    clusters = facts["clusters"]
    print(
        f"{facts['input_count']:,} records, {facts['total_tokens']:,} tokens; "
        f"{facts['embedded_now']:,} embedded now; {counts['empty_texts']:,} empty texts, "
        f"{counts['blank_lines']:,} blank lines, {counts['set_aside']:,} set aside"
    )
    print(
        f"{facts['n_clusters']} clusters, version {clusters['version']}, "
        + ("fitted now" if facts["is_refitted"] else f"share drift {clusters['share_tv']:.3f}")
    )
    figures = ("mean", "min_full", "last", "std", "ceiling", "percent_of_ceiling")
    rows = []
    for loader in ("concat", "flush"):
        found = {name: by_loader[loader] for name, by_loader in facts["diversity"].items()}
        for name in sorted(found, key=lambda name: found[name]["mean"]):
            rows.append([loader, name, *[found[name][figure] for figure in figures]])
    print(f"\nclusters in a window of {facts['sequence_length']:,} tokens")
    print_table(("windows", "order", "mean", "min", "last", "std", "ceiling", "% of it"), rows)
