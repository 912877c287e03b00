"""The writers that are no task of a run: exports, files of a loader, single files."""

import tomllib
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path

from loader import resolve_plan, verify_certificate
from loader.files.block_cache import BlockCache
from loader.files.blocks import BLOCKS_NAME, read_blocks, write_blocks
from loader.files.format import load_manifest, read_json_object
from loader.plan.file import load_plan
from loader.plan.remote import fetch_plan
from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import sha256_file
from nmoe_core.prep.versions import list_versions
from tests.core.engine.gguf_files import write_model
from tests.crash.project import nmoe, rows_of, run_task
from tests.crash.writers import Writer, grades, shards, tree_of, whole_shards
from tests.project import contents, json_lines, read_rows

_MANIFEST = "out/data/web/train/manifest.json"


def grow(project: Path) -> None:
    """Add documents to the input."""
    with open(project / "in" / "web.jsonl", "a") as file:
        file.write(json_lines(rows_of(1000, 1030)))


def checkpoint_of(project: Path) -> str:
    return tomllib.loads((project / "run.toml").read_text())["backbone"]["checkpoint"]


def _after(run: Callable[[Path], int | None], change: Callable[[Path], object]) -> Callable:
    """Make the old version by the same work, then change what it is made from."""

    def begin(project: Path) -> None:
        assert not run(project)
        change(project)

    return begin


def grow_shards(project: Path) -> None:
    """Add documents to the shards."""
    grow(project)
    assert run_task(project, "prep-mixture") == 0


def _grow_with_attributes(project: Path) -> None:
    grow_shards(project)
    assert run_task(project, "attributes") == 0


def _export(form: str) -> Writer:
    flags = ["--seq-len", "32"] if form == "mds" else []

    def export(project: Path) -> int:
        return nmoe(f"export {form}", project / _MANIFEST, "--output", project / form, *flags)

    def files(project: Path) -> object:
        value = read_json_object(project / form / "export.json")
        assert all(sha256_file(project / form / n) == d for n, d in value["files"].items())
        return value["content_hash"]

    views = lambda project: {form: partial(files, project)}  # noqa: E731
    change = _grow_with_attributes if form == "parquet" else grow_shards
    return Writer(export, views, _after(export, change), has_gap=True)


def _other_settings(project: Path) -> None:
    path = project / "run.toml"
    path.write_text(path.read_text().replace("min_doc_tokens = 1", "min_doc_tokens = 20"))


def _remake(project: Path) -> int:
    return nmoe("prep-mixture --force --config", project / "run.toml")


def _restore(project: Path) -> int:
    split = project / "out" / "data" / "web" / "train"
    return nmoe("versions restore", split, (project / "version").read_text())


def _restorable(project: Path) -> None:
    first = load_manifest(project / _MANIFEST).content_digest()
    _other_settings(project)
    assert _remake(project) == 0
    (project / "version").write_text(first[:12])


def _remove(project: Path) -> int:
    return nmoe("versions remove", project / "out" / "data" / "web" / "train")


def _num_versions(project: Path) -> int:
    return len(list_versions(project / "out" / "data" / "web" / "train"))


def _remix(project: Path) -> int:
    factor = (project / "factor").read_text()
    flags = ["--step", "1", "--weights", "web=1", "--phase", f"2:web=1:{factor}"]
    return nmoe("remix", tree_of(project).plan, *flags, "-o", project / "next.json")


def _remixable(project: Path) -> None:
    (project / "factor").write_text("0.5")
    assert _remix(project) == 0
    (project / "factor").write_text("0.25")


def _blocks(project: Path) -> None:
    write_blocks(load_manifest(project / _MANIFEST))


def _smaller_blocks(project: Path) -> None:
    write_blocks(load_manifest(project / _MANIFEST), 4096)


def _read_blocks(project: Path) -> object:
    return read_blocks(
        project / _MANIFEST.replace("manifest.json", BLOCKS_NAME),
        load_manifest(project / _MANIFEST),
    )


_CONTENTS = [bytes([i]) * 900 for i in range(4)]


def _cache_blocks(project: Path) -> None:
    cache = BlockCache(project / "cache", 10_000)
    for content in _CONTENTS:
        cache.get(sha256(content).hexdigest(), lambda content=content: content)


def _cached(project: Path) -> dict[str, Callable[[], object]]:
    (project / "cache").mkdir(exist_ok=True)
    cache, names = BlockCache(project / "cache", 10_000), [sha256(c).hexdigest() for c in _CONTENTS]
    there = lambda name: cache.path(name).exists() and cache.is_whole(name)  # noqa: E731
    return {name: partial(there, name) for name in names}


def _mirror(project: Path) -> None:
    fetch_plan(f"file://{tree_of(project).plan}", project / "mirror")


def _mirrored(project: Path) -> dict[str, Callable[[], object]]:
    plans = (project / "mirror").glob("*/plan-*.json")
    return {"plan": lambda: [load_plan(path).plan_hash for path in plans]}


def _tokenise(project: Path) -> None:
    resolve_plan(
        {
            "configs": {"t": {"train_urls": [str(project / "in" / "web.jsonl")]}},
            "weights": {"t": 1},
            "tokenizer": "o200k_harmony",
            "cache_dir": str(project / "cache"),
            "batch_size": 2,
            "seq_len": 64,
        }
    )


def _tokenised(project: Path) -> object:
    found = [whole_shards(path) for path in sorted(project.glob("cache/t-*/train/manifest.json"))]
    if not found:
        raise FormatError("no shards", where=project)
    return found


def _index(project: Path) -> Path:
    shard = next((project / "out" / "data" / "web" / "train" / "shard_0000").glob("*.npy"))
    return shard.with_suffix(".idx")


def _regenerate(project: Path) -> int:
    shard = _index(project).with_suffix(".npy")
    eos = load_manifest(project / _MANIFEST).eos_token_id
    return nmoe("regenerate-index", shard, "--eos-token-id", eos)


def _curate(project: Path) -> int:
    flags = ["--model-dir", checkpoint_of(project), "--n-clusters", "4", "--no-plot"]
    return nmoe("curate --input", project / "in/web.jsonl", "--output", project / "g.jsonl", *flags)


def _generate(project: Path) -> int:
    flags = ["--checkpoint", checkpoint_of(project), "--max-tokens", "2", "--max-seq-len", "16"]
    output = project / "completions.jsonl"
    return nmoe("generate", project / "prompts.jsonl", "-o", output, *flags, "--quiet")


def _prompts(project: Path, count: int = 6) -> None:
    rows = [{"id": f"p{i}", "tokens": [i, i + 1]} for i in range(count)]
    (project / "prompts.jsonl").write_text(json_lines(rows))


def _some_completed(project: Path) -> None:
    _prompts(project, 3)
    assert _generate(project) == 0
    _prompts(project)


def _tiny(project: Path) -> int:
    seed = (project / "seed").read_text()
    return nmoe("make-tiny-checkpoint", project / "tiny", "--seed", seed)


def _other_seed(project: Path) -> None:
    (project / "seed").write_text("0")
    assert _tiny(project) == 0
    (project / "seed").write_text("1")


def _weights(project: Path) -> object:
    if not (project / "tiny" / "config.json").is_file():  # written last: without it, no checkpoint
        raise FormatError("no checkpoint", where=project)
    return [sha256_file(path) for path in sorted((project / "tiny").glob("*.safetensors"))]


def _fetch(project: Path) -> int:
    return nmoe("fetch", project / "small.gguf", project / "fetched")


def _fetched(project: Path) -> object:
    if not (project / "fetched").is_dir():
        raise FormatError("no checkpoint", where=project)
    return sorted(contents(project / "fetched").items())


def _report(project: Path) -> int:
    return nmoe("report --html", project / "r" / "a.html", "--config", project / "run.toml")


def _one(name: str, read: Callable[[Path], object]) -> Callable:
    return lambda project: {name: partial(read, project)}


def _keep_all(project: Path) -> int:
    return run_task(project, "hydra grade --set grading.grader=none")


OTHER_WRITERS = {
    "hydra grade --set grading.grader=none": Writer(
        _keep_all, grades, _after(_keep_all, grow_shards), has_gap=True
    ),
    "export megatron": _export("megatron"),
    "export olmo": _export("olmo"),
    "export mds": _export("mds"),
    "export llmc": _export("llmc"),
    "export parquet": _export("parquet"),
    "prep-mixture --force": Writer(_remake, shards, _other_settings),
    "versions restore": Writer(_restore, shards, _restorable),
    "versions remove": Writer(_remove, _one("versions", _num_versions), _restorable),
    "remix": Writer(
        _remix,
        lambda project: {
            "plan": lambda: load_plan(project / "next.json").plan_hash,
            "certificate": lambda: verify_certificate(project / "next.certificate.json").step,
        },
        _remixable,
        has_gap=True,
        is_heavy=True,
    ),
    "blocks": Writer(_blocks, _one("blocks", _read_blocks), _smaller_blocks),
    "block cache": Writer(
        _cache_blocks, _cached, lambda project: None, ignored=("locks/bytes", ".part")
    ),
    "mirror": Writer(
        _mirror, _mirrored, lambda project: None, ignored=(".checked",), is_heavy=True
    ),
    "text of a trainer": Writer(
        _tokenise,
        _one("made", _tokenised),
        _after(_tokenise, grow),
        ignored=("-digests.json",),  # with the times of the input
        is_heavy=True,
    ),
    "regenerate-index": Writer(
        _regenerate,
        _one("index", lambda project: _index(project).exists()),
        lambda project: _index(project).unlink(),
    ),
    "curate": Writer(
        _curate,
        _one("records", lambda project: len(read_rows(project / "g.jsonl"))),
        _after(_curate, grow),
        is_heavy=True,
    ),
    "generate": Writer(
        _generate,
        _one("completions", lambda p: (p / "completions.jsonl").read_bytes().count(b"\n") > 3),
        _some_completed,
        is_heavy=True,
    ),
    "make-tiny-checkpoint": Writer(_tiny, _one("w", _weights), _other_seed, True, is_heavy=True),
    "fetch": Writer(
        _fetch, _one("model", _fetched), lambda p: write_model(p / "small.gguf"), is_heavy=True
    ),
    "report --html": Writer(
        _report,
        _one("page", lambda project: (project / "r" / "a.html").exists()),
        lambda project: None,
        is_heavy=True,
    ),
}
