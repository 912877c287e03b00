"""`nmoe takedown`: which documents of the list are in the run, and which outputs to make again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from loader.config import resolve_plan
from loader.edits.masking import mask
from loader.errors import PlanError, without_credentials
from loader.files.format import read_json_object
from loader.plan.records import LoaderPlan
from loader.rows.stream import Stream
from loader.state import resume
from nmoe_core.audit.plans.placed import require_one_place
from nmoe_core.audit.takedown.find import Found, find, no_urls
from nmoe_core.audit.takedown.items import Item, read_items
from nmoe_core.audit.takedown.places import Place, places
from nmoe_core.audit.takedown.proof import prove
from nmoe_core.base.atomic import replacing, write_bytes, write_json
from nmoe_core.base.bucket.paths import bucket_of, shown
from nmoe_core.base.errors import ConfigError
from nmoe_core.base.fingerprint import seal_summary
from nmoe_core.config.run import Run
from nmoe_core.curate.settings import curate_settings
from nmoe_core.curate.takedown.record import Row, add_rows, read_rows, taken_down
from nmoe_core.prep.mixture import run_sources
from nmoe_core.shards.manifest import created_at
from nmoe_core.tasks.takedown.labels import LabelsOf
from nmoe_core.tasks.takedown.near_copies import near_copies
from nmoe_core.tasks.takedown.readings import Readings, readings_of
from nmoe_core.text.tokenizer import load_tokenizer

Facts = dict[str, Any]
_MAX_STATE_BYTES = 64 * 2**20


def find_documents(run: Run, path: Path) -> tuple[list[Item], list[Found]]:
    """The items of a list and the matching documents; raises the errors of `read_items` and
    `find`."""
    items = read_items(path)
    if any(item.kind == "url" for item in items) and "url" not in run.config.attributes.columns:
        raise no_urls(run.path)
    return items, find(run.tree, items, run.tokenizer)


def report(run: Run, path: Path, plan_path: Path | None, states: Sequence[Path]) -> Facts:
    """Report the documents of a list, the steps of a plan that read them, the loader states after
    these steps, and the outputs to make again. Writes no file.

    Args:
        run: The run.
        path: The list.
        plan_path: Plan of a loader; by default the plan of the run, if it exists.
        states: JSON files of `state_dict()` of loaders of that plan.

    Raises:
        NmoeError: As `find_documents`, `resolve_plan` and `loader.state.resume`.
    """
    items, found = find_documents(run, path)
    recorded = taken_down(run.tree)
    facts: Facts = {
        **_of_items(items, found),
        "documents": list(map(_document, found)),
        "recorded": sum(one.text_sha256 in recorded for one in found),
        **_of_plan(run, found, plan_path, states),
        "near_copies": near_copies(run, found),
        **LabelsOf(run.tree, [*found, *_rows_of(items, read_rows(run.tree))]).counts(),
        "rebuild": _rebuild(run, found),
        **_copies(run, [run.tree.curated, run.tree.data]),
    }
    return facts


def apply(run: Run, path: Path, by: str, why: str, *, erase_labels: bool = False) -> Facts:
    """Record the documents of a list; curation drops recorded documents. `erase_labels` erases
    their texts in labels. Raises as `find_documents`, `add_rows` and `LabelsOf.erase`."""
    items, found = find_documents(run, path)
    at = created_at()
    rows = [
        {
            **{key: getattr(one, key) for key in ("source", "split", "ingest_id", "doc_id")},
            "text_sha256": one.text_sha256,
            "item": str(one.items[0]),
            "is_copy": one.is_copy,
            "tokenizer": one.tokenizer,
            "at": at,
            "by": by,
            "why": why,
        }
        for one in found
    ]  # data shards come first, so a curated document is added only if it is in no data shard
    tokens = {one.text_sha256: one.tokens for one in found}
    added = add_rows(run.tree, rows, tokens, load_tokenizer(run.tokenizer).decode)
    recorded = _rows_of(items, read_rows(run.tree))
    erased = LabelsOf(run.tree, [*found, *recorded]).erase() if erase_labels else []
    return {
        **_of_items(items, found),
        "added": len(added),
        "erased": erased,
        "recorded": len(read_rows(run.tree)),
        "record": shown(run.tree.takedown),
        "rebuild": _rebuild(run, found),
        **_copies(run, [run.tree.curated, run.tree.data]),
    }


def verify(
    run: Run, path: Path, *, raw: bool, allow_shared: bool, everywhere: Sequence[Path] | None = None
) -> Facts:
    """Write a proof that recorded texts are removed from curated shards; with `raw`, also from data
    shards; with `everywhere`, also from all other files of the run and of these directories. The
    proof fails if documents of the list are not recorded. Raises as `find_documents` and
    `prove`."""
    items, found = find_documents(run, path)
    recorded = taken_down(run.tree)
    unrecorded = [one.doc_id for one in found if one.text_sha256 not in recorded]
    raw |= everywhere is not None
    roots = [run.tree.curated, *([run.tree.data] if raw else [])]
    labels = LabelsOf(run.tree, [*found, *read_rows(run.tree)]).counts()
    also = [] if everywhere is None else places(run, everywhere)
    elsewhere = {"labels": labels["labels"], **_copies(run, roots, also)}
    proof = prove(run, roots, unrecorded, elsewhere, allow_shared=allow_shared, also=also)
    if proof["unreadable"]:
        files = ", ".join(row["path"] for row in proof["unreadable"])
        proof["not_covered"].append(f"files that could not be read ({files})")
    with replacing(run.tree.takedown_proof):
        write_json(run.tree.takedown_proof, seal_summary(proof))
    names = {row.item for row in read_rows(run.tree)}
    facts = {key: value for key, value in proof.items() if key != "scanned"}
    unmatched = _of_items(items, found)["unmatched"]
    facts["unmatched"] = [item for item in unmatched if item not in names]
    return facts | {"raw": raw, "proof": shown(run.tree.takedown_proof)}


def mask_plan(run: Run, path: Path, plan_path: Path, output: Path) -> Facts:
    """Commit a plan in which the documents of a list are not targets and EOS replaces their text.
    Raises as `find_documents`, `loader.mask` and `require_one_place`, and ConfigError if the plan
    reads no file with these documents."""
    _, found = find_documents(run, path)
    plan = resolve_plan(plan_path)
    output = output.absolute()
    require_one_place(output, plan.base)
    with closing(Stream(plan, "train")) as stream:
        names = stream.sources_of_files()
    tokens = [one.place._replace(source=names[one.path]) for one in found if one.path in names]
    if not tokens:
        raise ConfigError(
            "the plan reads no document of the list",
            where=plan_path,
            expected=f"a plan over files of this run, as {shown(run.tree.curated)}",
            do="give the plan that the loader opens in this directory",
        )
    after = mask(plan, tokens, replace_text=True)
    with replacing(output):
        write_bytes(output, after.placed_in(output.parent).to_json().encode())
    return {"plan": shown(output), "plan_hash": after.plan_hash, "masked": len(tokens)}


def _copies(run: Run, roots: Sequence[Path], also: Sequence[Place] = ()) -> Facts:
    """The places that are not searched, the run's store, and the plan to upload there."""
    url = run.config.publish.url
    store = without_credentials(url) if url else None
    covered = {*roots, *(path for place in also if place.is_searchable for path in place.paths)}
    left = [place for place in places(run) if not covered.issuperset(place.paths)]
    names = [*map(str, left), "caches of loaders, exports and pages in other directories"]
    if bucket_of(run.tree.root) is not None:
        names += [
            f"earlier versions in {shown(run.tree.root)}, which nmoe gc --apply removes",
            "local directories of machines that used the bucket",
        ]
    names += [
        "inputs on the hub or in stores",
        "models that learned from them",
        f"{store} and other stores" if store else "stores",
    ]
    return {"not_covered": names, "published": store, "run_plan": shown(run.tree.plan)}


def _of_items(items: Sequence[Item], found: Iterable[Found]) -> Facts:
    """Items with the numbers of their documents, and items without documents."""
    counts: dict[Item, Counter[str]] = {item: Counter() for item in items}
    for one in found:
        for item in one.items:
            counts[item]["copies" if one.is_copy else "documents"] += one.tree == "data"
            counts[item]["curated"] += one.tree == "curated"
    names = ("documents", "copies", "curated")
    return {
        "items": [
            {"item": str(item), "line": item.line, **{name: n[name] for name in names}}
            for item, n in counts.items()
        ],
        "unmatched": [str(item) for item, n in counts.items() if not n.total()],
    }


def _document(one: Found) -> Facts:
    keys = ("tree", "source", "split", "shard", "doc_id", "ingest_id", "text_sha256", "is_copy")
    row = {"item": str(one.items[0]), **{key: getattr(one, key) for key in keys}}
    return row | {"tokens": len(one.tokens)}


def _of_plan(
    run: Run, found: Sequence[Found], plan_path: Path | None, states: Sequence[Path]
) -> Facts:
    """Steps of a plan that read the documents, by document id, and the states that have read
    them."""
    path = plan_path or run.tree.plan
    facts: Facts = {"plan": shown(path), "plan_problem": None, "readings": [], "states": []}
    if not path.is_file() and plan_path is None and not states:
        return facts | {"plan": None}
    try:
        plan = resolve_plan(path)
    except PlanError as error:  # shards were curated again, but the plan was not rebuilt yet
        if plan_path is not None or states:
            raise
        return facts | {"plan_problem": error.line()}
    with closing(Stream(plan, "train")) as stream:
        read = readings_of(stream, [one.place for one in found])
        reached = {path: _reached(plan, path, stream) for path in states}
    for one in found:
        if (reading := read.get(one.place)) is not None:
            passed = [str(path) for path, n in reached.items() if n > reading.first]
            row = {"tree": one.tree, "doc_id": one.doc_id, **_reading(plan, reading)}
            facts["readings"].append(row | {"states": passed})
    for path, n in reached.items():
        count = sum(str(path) in row["states"] for row in facts["readings"])
        row = {"state": str(path), "sequence": n, "step": n // plan.batch_size}
        facts["states"].append(row | {"documents_read": count})
    return facts


def _reading(plan: LoaderPlan, reading: Readings) -> Facts:
    steps = {f"{key}_step": getattr(reading, key) // plan.batch_size for key in ("first", "last")}
    sequences = {"first_sequence": reading.first, "last_sequence": reading.last}
    return {**sequences, "sequences": reading.num, **steps}


def _reached(plan: LoaderPlan, path: Path, stream: Stream) -> int:
    """Number of the plan's sequences that a state's loader has read."""
    own, n = resume(read_json_object(path, _MAX_STATE_BYTES), plan, "train", stream)
    if own.consumed != plan.consumed:
        raise ConfigError(
            "the state belongs to another plan, so its position in this plan is unknown",
            where=path,
            do="give the plan of the state with --plan",
        )
    return n


def _rows_of(items: Iterable[Item], rows: Sequence[Row]) -> list[Row]:
    """The rows of the record that the items of the list match now, or matched when they were
    recorded, and the copies of these documents."""
    named = {str(item) for item in items}
    keys = ("id:{0.ingest_id}", "id:{0.doc_id}", "sha256:{0.text_sha256}", "{0.item}")
    texts = {row.text_sha256 for row in rows if any(key.format(row) in named for key in keys)}
    return [row for row in rows if row.text_sha256 in texts]


def _rebuild(run: Run, found: Sequence[Found]) -> Mapping[str, Any]:
    """Outputs with the texts, and outputs to make again: `data` and `curated`: shards with the
    texts; `curate`: shards that curation will rewrite; `later`: shards after them, whose windows
    may shift; `plan`: whether the plan will be rebuilt."""
    hold: dict[str, dict[str, int]] = {"data": {}, "curated": {}}
    curate: dict[str, None] = {}
    later: dict[str, None] = {}
    for one in found:
        name = f"{one.source}/{one.split}/{one.shard}"
        hold[one.tree][name] = hold[one.tree].get(name, 0) + 1
    for source in (plan.name for plan in run_sources(run)):
        fills = curate_settings(run, source).fills_windows()
        behind = False
        for shard in run.tree.shards(source, run.config.prep.num_shards):
            name = f"{source}/train/{shard.name}"
            if name in hold["data"] or name in hold["curated"]:
                curate[name] = None
                behind = fills
            elif behind:
                later[name] = None
    return {**hold, "curate": list(curate), "later": list(later), "plan": bool(curate)}
