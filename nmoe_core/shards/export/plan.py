"""Exports all sources of a loader plan, with the lines that give a trainer their shares."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from loader.files.format import load_manifest, resolve_inside
from loader.plan.file import load_plan
from loader.plan.records import LoaderPlan
from nmoe_core.base.atomic import replacing, write_bytes, write_json
from nmoe_core.base.fingerprint import seal_summary, sha256_json
from nmoe_core.base.result import Result
from nmoe_core.shards.export.run import Form, export

MIXTURE_NAME = "mixture.json"
_HF_SPLITS = {"train": "train", "valid": "validation"}
Row = dict[str, Any]


def export_plan(
    path: Path, output: Path, form: Form, seq_len: int | None = None, tokenizer: str | None = None
) -> Result:
    """Export every source of a plan to `{output}/{source}/train`, validation to `.../valid`, and
    write `mixture.json`: shares of the whole run's sequences, `stages`, and what the format has
    `not_exported`. For `olmo`, masks are written beside the files.

    Returns:
        As `export`, with `use`: the lines for the trainer's configuration, and `not_exported`.

    Raises:
        NmoeError: As `export` and `load_plan`.
    """
    plan = load_plan(path)
    taken = plan.taken()
    facts: Row = {"files": [], "documents": 0, "tokens": 0, "tokens_left_out": 0, "changed": False}
    rows = []
    for split, sources in (("train", plan.sources), ("valid", plan.valid)):
        total = sum(taken[one.name] if split == "train" else one.num_tokens for one in sources)
        for one in sources:
            place = output / one.name / split
            manifest = resolve_inside(plan.base, one.manifest)
            made = export(manifest, place, form, seq_len, tokenizer).facts
            facts["files"] += [f"{one.name}/{split}/{name}" for name in made["files"]]
            facts["changed"] |= made["changed"]
            for key in ("documents", "tokens", "tokens_left_out"):
                facts[key] += made[key]
            share = (taken[one.name] if split == "train" else one.num_tokens) / total
            row = {"source": one.name, "split": split, "share": share, "content": one.content_hash}
            rows.append(row | {"name": load_manifest(manifest).dataset, "files": made["files"]})
            if form == "olmo" and split == "train":
                masks = _write_masks(plan, one.name, manifest, place)
                facts["files"] += [f"{one.name}/{name}" for name in masks]
    stages = [{one.name: one.num_sequences for one in stage.sources} for stage in plan.stages]
    lost = _not_exported(plan, form)
    value = {"plan_hash": plan.plan_hash, "sources": rows, "stages": stages, "not_exported": lost}
    with replacing(output / MIXTURE_NAME):
        write_json(output / MIXTURE_NAME, seal_summary({"format": form, **value}))
    facts |= {"use": _use_of(form, output, rows, plan), "not_exported": lost}
    return Result(sha256_json(value), facts)


def _write_masks(plan: LoaderPlan, source: str, manifest: Path, place: Path) -> list[str]:
    """Write the plan's masks of a source as OLMo-core reads them: one bool per token, false if the
    token is not a target."""
    names = []
    loaded = load_manifest(manifest)
    for number, entry in enumerate(loaded.shards) if plan.masked else ():
        mask = np.ones(entry.num_tokens, np.bool_)
        for one in plan.masked:
            if (one.source, one.file) == (source, entry.path):
                mask[one.start : one.end] = False
        path = place.parent / "masks" / f"{loaded.dataset}-{number:05d}.npy"
        path.parent.mkdir(exist_ok=True)
        write_bytes(path, mask.tobytes())
        names.append(f"masks/{path.name}")
    return names


def _not_exported(plan: LoaderPlan, form: Form) -> list[str]:
    """What the format cannot hold of the plan."""
    found = {
        "the order of windows, which the trainer chooses itself": True,
        "the weights of sources": form == "llmc",
        "the shares of each stage: the shares are those of the whole run": len(plan.stages) > 1,
        "masks": bool(plan.masked) and form != "olmo",
        f"packing = {plan.packing!r}": plan.packing != "concat",
        "the last tokens of each file that fill no sequence": form == "olmo",
    }
    return [what for what, is_lost in found.items() if is_lost]


def _use_of(form: Form, output: Path, rows: list[Row], plan: LoaderPlan) -> str:
    """The lines for the trainer's configuration that name the exported files and their shares."""
    lines = []
    for split in dict.fromkeys(row["split"] for row in rows):
        of_split = [row for row in rows if row["split"] == split]
        places = [str(output / row["source"] / split) for row in of_split]
        shares = [f"{row['share']:.6g}" for row in of_split]
        match form:
            case "megatron":
                prefixes = (f"{place}/{row['name']}" for place, row in zip(places, of_split))
                lines.append(f"--{split}-data-path {' '.join(chain(*zip(shares, prefixes)))}")
            case "olmo":
                for row, place, share in zip(of_split, places, shares):
                    paths = f"{row['source']!r}, target_ratio={share}, paths=['{place}/*.npy']"
                    lines.append(f"SourceMixtureConfig(source_name={paths}),  # {split}")
            case "mds":
                for place, share in zip(places, shares):
                    lines.append(f"Stream(local={place!r}, proportion={share}),  # {split}")
            case "llmc":
                flag = "-i" if split == "train" else "-j"
                lines.append(f'{flag} "{output}/*/{split}/*.bin"')
            case "parquet":
                parts = f"[load_dataset(path)[{_HF_SPLITS[split]!r}] for path in {places}]"
                lines.append(f"interleave_datasets({parts}, probabilities=[{', '.join(shares)}])")
    if form == "olmo":
        numbers = f"vocab_size={plan.vocab_size}, eos_token_id={plan.eos_token_id}"
        lines.append(f"TokenizerConfig({numbers}, pad_token_id={plan.eos_token_id})")
    return "\n".join(lines)
