"""Origin of a corpus, integrity of its files, and its cost."""

import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loader.errors import without_credentials
from loader.files.format import load_manifest
from loader.plan.file import load_plan
from nmoe_core.base.errors import NmoeError
from nmoe_core.base.fingerprint import sha256_file
from nmoe_core.prep.mixture import run_sources
from nmoe_core.quality.calibration.summary_file import read_calibration
from nmoe_core.report.html import Html, element, joined, note, paragraph, table
from nmoe_core.shards.verify import verify_manifest
from nmoe_core.sources.spec import SourceSpec
from nmoe_core.tasks.backbone import backbone_kind
from nmoe_core.tasks.preview import TOLD, not_current, told
from nmoe_core.tasks.report.corpus import Corpus, readable_manifest
from nmoe_core.tasks.report.summary import head_headers

HASHED_BYTES = 4_000_000_000  # if files have more bytes than this, only sizes are compared
Cost = Sequence[Mapping[str, Any]]


def state(corpus: Corpus) -> Iterator[object]:
    """Outputs that are not current, with reasons."""
    if rows := told(not_current(corpus.run)):
        yield table(TOLD, rows)
    else:
        yield paragraph("Every output is current.")


def integrity(corpus: Corpus) -> Iterator[object]:
    """Compare the files of every existing manifest with the manifest."""
    tree = corpus.run.tree
    paths = [path for name in corpus.sources for path in _manifests(corpus, name)]
    size = sum(file.stat().st_size for path in paths for file in path.parent.rglob("*.npy"))
    is_hashed = size <= HASHED_BYTES
    how = "SHA-256 of every file" if is_hashed else "size of every file (`nmoe verify` hashes them)"
    yield paragraph(f"Compared with each manifest: {how}, indexes and counts.")
    rows = []
    for path in paths:
        shown = path.relative_to(tree.root) if path.is_relative_to(tree.root) else path
        try:
            found = load_manifest(path)
            problems = [str(one) for one in verify_manifest(found, checksums=is_hashed)]
            counts: list[object] = [found.num_shards, found.total_tokens]
            counts.append(element("code", found.content_digest()[:16]))
        except NmoeError as error:
            problems = [" ".join(str(error).split())]
            counts = [None] * 3
        kind = "bad" if problems else "good"
        state = element("span", problems[0] if problems else "whole", kind=kind)
        rows.append([str(shown), *counts, state])
    yield table(["manifest", "files", "tokens", "digest", "state"], rows)
    if tree.plan.is_file():
        plan = load_plan(tree.plan)
        steps = plan.num_sequences // plan.batch_size
        yield paragraph(
            f"The loader plan has {steps:,} steps of {plan.batch_size:,} x {plan.seq_len:,} "
            "tokens, and digest ",
            element("code", plan.plan_hash),
        )
    else:
        yield note("No loader plan yet. Run ", element("code", "nmoe run curate"))


def _manifests(corpus: Corpus, source: str) -> list[Path]:
    tree = corpus.run.tree
    found = [tree.manifest(source), tree.manifest(source, "valid"), tree.curated_manifest(source)]
    return [path for path in found if path.is_file()]


def provenance(corpus: Corpus) -> Iterator[object]:
    """Sources, tokenizer, models and versions."""
    run = corpus.run
    rows = []
    for source in run_sources(run):
        manifest = readable_manifest(run.tree.manifest(source.name))
        made = {} if manifest is None else manifest.extra.get("fingerprints", {})
        revision = element("code", made.get("source", "")[:16])
        created = None if manifest is None else manifest.extra.get("created_at")
        rows.append([source.name, source.spec.kind, origin(source.spec), revision, created])
    yield table(["source", "kind", "from", "revision", "prepared"], rows)
    yield table(["what", "is"], [[name, _code(value)] for name, value in facts(corpus).items()])


def _code(value: str) -> Html:
    return element("code", value)


def origin(spec: SourceSpec) -> str:
    """The files or the dataset of a source, without credentials."""
    if spec.hf_dataset:
        parts = [spec.hf_dataset, spec.hf_subset, spec.hf_revision]
        return " ".join(part for part in parts if part)
    return ", ".join(map(without_credentials, spec.paths))


def facts(corpus: Corpus) -> dict[str, str]:
    """Tools and settings of the corpus, by name; parts that are not made yet are left out."""
    run = corpus.run
    found = {
        "configuration": run.path.name,
        "its SHA-256": sha256_file(run.path) if run.path.is_file() else "",
        "nmoe-data": version("nmoe-data"),
        "Python": platform.python_version(),
        "tokenizer": str(run.tokenizer.name),
        "seed": str(run.loader.seed),
        "backbone": backbone_kind(run),
    }
    if run.tree.calibration_summary.is_file():
        summary = read_calibration(run.tree.calibration_summary)
        found["oracle"] = f"{summary['scorer_model']}/{summary['scorer_version']}"
        found["labels"] = str(summary["labels_digest"])
        for kind, header in head_headers(run).items():
            found[kind] = str(header["tensors_sha256"])
    if run.tree.plan.is_file():
        found["loader plan"] = load_plan(run.tree.plan).plan_hash
    return {name: value for name, value in found.items() if value}


def cost(rows: Cost) -> Html:
    """Time of each task in Dagster runs; `rows` have `task`, `runs`, `seconds` and `last`."""
    if not rows:
        return note("No times yet: only `nmoe run` and the UI record the time of tasks.")
    total = ["all", sum(row["runs"] for row in rows), sum(row["seconds"] for row in rows), None]
    shown = [[row["task"], row["runs"], row["seconds"], row["last"]] for row in rows]
    return joined([table(["task", "runs", "seconds", "last"], [*shown, total])])
