"""Twin plans: two runs read one corpus in two tokenizers, in the same order at each step."""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from loader.errors import ConfigError, PlanError
from loader.files.addresses import common_parent, real
from loader.files.format import Manifest, check_digest, resolve_inside
from loader.files.regular import open_file
from loader.plan import check as preflight
from loader.plan.build import source_data
from loader.plan.datasets import locate, split_dirs, valid_manifests
from loader.plan.records import LoaderPlan, PlanSource, TwinData
from loader.plan.settings import Vocabulary
from loader.rows.stream import Stream


def twin(plan: LoaderPlan, sources: Mapping[str, str | Path], seq_len: int) -> LoaderPlan:
    """The plan that reads the text of `plan` in another tokenizer: each row has the text of the
    same row of `plan`, followed by padding. If a window ends inside a document, the cut is at the
    same fraction of the document's tokens.

    Weights, order, shuffles, steps and ranks are the same as in `plan`, so after any number of
    sequences both runs have read the same documents, to within one window. sources: for each source
    of the plan the directory or manifest in the other tokenizer, with the same documents in the
    same order. seq_len: tokens of a row, enough for the longest text of a window. A source's valid
    split is the split beside it. Writes no file.

    Raises:
        ConfigError: The given sources differ from the plan's, or the plan packs documents, masks
            tokens, continues another run, or wraps in the middle of a window.
        PlanError: The documents differ (E-PLAN-DATA) in number or, if both manifests name files of
            ids, in id or text; or `seq_len` is too small (E-PLAN-TWIN).
        FormatError: A source has no index, or a file of ids is damaged.
    """
    where = f"twin of {plan.plan_id}"
    names = [source.name for source in plan.sources]
    if set(names) != set(sources):
        found = ", ".join(sorted(sources))
        raise ConfigError(
            "the given sources differ from the plan's sources",
            where=where,
            found=found,
            expected=str(names),
        )
    if plan.packing != "concat" or plan.masked or plan.consumed or plan.wraps_tokens:
        raise ConfigError(
            "this plan cannot have a twin",
            where=where,
            expected="packing = 'concat', no masks, no `consumed`; if on_exhaust = 'wrap', also"
            " shuffle = true",
        )
    splits = {name: split_dirs(real(path)) for name, path in sources.items()}
    paths = {name: locate(train, False) for name, (train, _) in splits.items()}
    valids = valid_manifests({name: valid for name, (_, valid) in splits.items() if valid})
    base = common_parent([plan.base, *(path.parent for path in paths.values())])
    moved = plan.moved_to(base)
    loaded = {
        path: preflight.read_data(path, Vocabulary())
        for path in (*paths.values(), *valids.values())
    }
    named = [(name, loaded[path]) for name, path in (*paths.items(), *valids.items())]
    agreed = preflight.agreed_vocabulary(named, Vocabulary())
    own = {name: source_data(name, moved.base, path, loaded[path]) for name, path in paths.items()}

    def of_stage(source: PlanSource) -> PlanSource:
        new = own[source.name]
        return replace(
            source, manifest=new.manifest, content_hash=new.content_hash, num_tokens=new.num_tokens
        )

    after = replace(
        moved,
        **agreed._asdict(),
        packing="twin",
        seq_len=seq_len,
        stages=tuple(replace(s, sources=tuple(map(of_stage, s.sources))) for s in moved.stages),
        valid=tuple(source_data(n, moved.base, p, loaded[p]) for n, p in valids.items()),
        twins=tuple(
            TwinData(s.name, s.manifest, s.content_hash, s.num_tokens, plan.seq_len, plan.stride)
            for s in moved.sources
        ),
    )
    preflight.check_plan(after, where)
    with closing(Stream(after, "train")) as stream, closing(Stream(plan, "train")) as other:
        if stream.capacities != other.capacities:
            raise PlanError(
                "the twin has a different number of windows", where=where, code="E-PLAN-DATA"
            )
    for name, one, two in _pairs(after):
        ours = _ids_files(one)
        theirs = _ids_files(two)
        if ours is not None and theirs is not None:
            _compare(name, ours, theirs)
    return after


def uncompared(plan: LoaderPlan) -> list[str]:
    """Sources of a twin plan for which only the number of documents was compared, because one of
    the manifests names no files of ids, or they are missing. Raises the errors of `open_data`."""
    return [name for name, *both in _pairs(plan) if None in map(_ids_files, both)]


def _pairs(plan: LoaderPlan) -> Iterator[tuple[str, Manifest, Manifest]]:
    """Each source of a twin plan, with its manifest and the manifest of its twin."""
    for source, (other, _, _) in zip(plan.sources, preflight.open_twins(plan)):
        yield source.name, preflight.open_data(plan, source), other


def _ids_files(manifest: Manifest) -> list[tuple[Path, object]] | None:
    """The files of document ids with their digests, in reading order; None if a file is missing."""
    root = manifest.path.parent
    found = []
    for entry in manifest.shards:
        name = entry.extra.get("ids_path")
        if not isinstance(name, str) or not (path := resolve_inside(root, name)).is_file():
            return None
        found.append((path, entry.extra.get("ids_checksum")))
    return found


def _lines(files: list[tuple[Path, object]]) -> Iterator[tuple[Path, bytes]]:
    for path, digest in files:
        if isinstance(digest, str):
            check_digest(path, digest, "E-SHARD-CHECKSUM")
        with open_file(path) as file:
            yield from ((path, line) for line in file)


def _compare(name: str, own: list[tuple[Path, object]], theirs: list[tuple[Path, object]]) -> None:
    for number, ((path, ours), (_, other)) in enumerate(zip(_lines(own), _lines(theirs))):
        if ours != other and (found := _document(ours)) != (expected := _document(other)):
            raise PlanError(
                f"document {number} of source {name!r} differs from the plan's",
                where=path,
                found="id {!r}, text {}".format(*found),
                expected="id {!r}, text {}".format(*expected),
                do="prepare the same input with the same settings, except the tokenizer",
                code="E-PLAN-DATA",
            )


def _document(line: bytes) -> tuple[object, object]:
    """The id and the text's SHA-256 from a line of a file of ids, or the line itself if it has no
    SHA-256."""
    try:
        row = json.loads(line)
        return row["id"], row["text_sha256"]
    except (ValueError, KeyError, TypeError):
        return line[:80], "unknown"
