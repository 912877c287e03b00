"""Slices: the ids of all training documents, divided into train, val and test by their MD5.

Heads are fitted on train and chosen on val; test is only used for reported figures. Rows are
ordered by the files in the committed manifest (by path component), then by the documents in each
index. Only `train/` is sliced. Other tools depend on the rows and the rules (docs/formats.md).
Memory holds one index.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from loader.files.checksummed_json import sealed
from loader.files.format import MANIFEST_NAME, Manifest, load_manifest
from loader.files.nested import json_value
from loader.files.regular import open_file, read_file
from nmoe_core.base.atomic import (
    LOCKS_NAME,
    TMP_MARK,
    atomic_file,
    clear_left,
    output_lock,
    write_json,
)
from nmoe_core.base.docid import parse_doc_id, split_of
from nmoe_core.base.errors import FormatError, LockedError
from nmoe_core.base.fingerprint import (
    Fingerprints,
    is_current,
    read_summary,
    sha256_file,
    sha256_json,
    while_unchanged,
)
from nmoe_core.base.result import Result
from nmoe_core.config.tree import Tree
from nmoe_core.shards.documents import document_ids
from nmoe_core.shards.manifest import digest_of, documents_digest

SLICE_CODE = "slices/1"
SUMMARY_NAME = "slices.json"
COMBINED_NAME = "slices_manifest.json"
FORMAT = "nmoe-slices/1"
MAX_WAIT_S = 600.0
SPLITS = ("train", "val", "test")
NUM_LABEL_SHARDS = 8
LABEL_SHARDS = [(split, i) for split in SPLITS for i in range(NUM_LABEL_SHARDS)]
_LISTS = {split: f"docids_{split}.jsonl" for split in SPLITS}
_COMBINED = [*_LISTS.values(), *(f"{split}_shard_{i:02d}" for split, i in LABEL_SHARDS)]


def source_manifest(data_root: Path, source: str) -> Manifest:
    """The committed manifest of a source's training documents."""
    return load_manifest(_manifest_path(data_root, source))


def _manifest_path(data_root: Path, source: str) -> Path:
    return data_root / source / "train" / MANIFEST_NAME


def data_digest(data_root: Path, sources: Sequence[str]) -> str:
    """SHA-256 over the contents of the named sources; document ids are valid only for these
    contents."""
    return sha256_json({s: digest_of(_manifest_path(data_root, s)) for s in sources})


_contents: dict[str, Any] = {}


def former_data_digest(data_root: Path, sources: Sequence[str]) -> str:
    """`data_digest` of earlier versions, which hashed whole manifests, not only their documents."""

    def digest(path: Path) -> str:
        return load_manifest(path).content_digest()

    paths = {s: _manifest_path(data_root, s) for s in sources}
    return sha256_json({s: while_unchanged(path, digest, _contents) for s, path in paths.items()})


def write_source_slices(tree: Tree, source: str) -> Result:
    """List the documents of one source in `slices/sources/{source}/docids_{split}.jsonl`.

    Returns the digest of the summary; facts: documents per split, and whether they `changed`.
    Raises FormatError if the source has no committed manifest, or an index does not match it.
    """
    manifest = source_manifest(tree.data, source)
    out_dir = tree.source_slices(source)
    summary = out_dir / SUMMARY_NAME
    names = list(_LISTS.values())
    fingerprints = slice_fingerprints(documents_digest(manifest))
    if _is_whole(summary, fingerprints, names):
        clear_left(out_dir)
        return _result(summary, changed=False)
    counts: dict[str, int] = dict.fromkeys(SPLITS, 0)
    with output_lock(out_dir):
        with ExitStack() as stack:
            files = {s: stack.enter_context(atomic_file(out_dir / _LISTS[s])) for s in SPLITS}
            for document in document_ids(tree.data, manifest):
                split = split_of(str(document))
                row = {"doc_id": str(document), "source": document.source}
                files[split].write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                counts[split] += 1
            # Remove the summary before replacing its files, so that it never describes other rows.
            summary.unlink(missing_ok=True)
        facts = {"source": source, "counts": counts}
        return _commit(summary, facts, names, fingerprints)


def slice_fingerprints(documents: str) -> Fingerprints:
    """Fingerprints of the slices of a source, from the digest of its documents."""
    return {"code": SLICE_CODE, "data": documents}


def combine_slices(tree: Tree, sources: Sequence[str]) -> Result:
    """Join the slices of sources, in the order of their names, and divide them into label shards.

    Writes `docids_{train,val,test}.jsonl`, `{train,val,test}_shard_00` to `_07` (line `j` goes to
    shard `j mod 8`), and `slices_manifest.json` last. Several processes may call this function at
    once: one process writes, the others wait. Returns as `write_source_slices`.

    Raises:
        FormatError: A source has no slices yet (E-MANIFEST-MISSING), or its slices were changed
            after they were written (E-SLICE-CHANGED).
        LockedError: Another process has been writing for ten minutes (E-LOCKED).
    """
    names = sorted(set(sources))
    parts = {s: _read_summary(tree.source_slices(s) / SUMMARY_NAME) for s in names}
    fingerprints = {"code": SLICE_CODE, **{f"slices:{s}": sha256_json(parts[s]) for s in names}}
    summary = tree.slices / COMBINED_NAME
    if _is_whole(summary, fingerprints, _COMBINED):
        return _result(summary, changed=False)
    with _combining(tree.slices):
        if _is_whole(summary, fingerprints, _COMBINED):
            return _result(summary, changed=False)
        for path in (tree.source_slices(s) / name for s in names for name in _LISTS.values()):
            _check_digest(path, sha256_file(path))
        summary.unlink(missing_ok=True)
        counts = {split: _combine_split(tree, names, split) for split in SPLITS}
        facts = {"counts": counts, "sources": names}
        return _commit(summary, facts, _COMBINED, fingerprints)


def _combine_split(tree: Tree, sources: Sequence[str], split: str) -> int:
    num_rows = 0
    shards = [tree.slice(split, i) for i in range(NUM_LABEL_SHARDS)]
    with ExitStack() as stack:
        paths = tree.slices / _LISTS[split], *shards
        whole, *dealt = (stack.enter_context(atomic_file(path)) for path in paths)
        for source in sources:
            with open_file(tree.source_slices(source) / _LISTS[split]) as rows:
                for row in rows:
                    whole.write(row)
                    dealt[num_rows % NUM_LABEL_SHARDS].write(row)
                    num_rows += 1
    return num_rows


@contextmanager
def _combining(slices_dir: Path) -> Iterator[None]:
    """Lock the combined files, waiting for another writer, and remove files that a killed writer
    left.

    The whole directory is not locked, because sources below it may be written at the same time.
    """
    ends_at = time.monotonic() + MAX_WAIT_S
    with ExitStack() as stack:
        while True:
            try:
                paths = [slices_dir / name for name in (*_COMBINED, COMBINED_NAME)]
                stack.enter_context(output_lock(slices_dir / LOCKS_NAME / "combined", *paths))
                break
            except LockedError:
                if time.monotonic() > ends_at:
                    raise
                time.sleep(0.05)
        for name in (*_COMBINED, COMBINED_NAME):
            for left in slices_dir.glob(f"{name}{TMP_MARK}*"):
                left.unlink()
        yield


def _is_whole(summary: Path, fingerprints: Fingerprints, names: Sequence[str]) -> bool:
    """Whether the output is current and all of its files exist."""
    is_there = all((summary.parent / name).is_file() for name in names)
    return is_there and is_current(summary, fingerprints)


def _commit(
    summary: Path, facts: dict[str, Any], names: Sequence[str], fingerprints: Fingerprints
) -> Result:
    files = {name: sha256_file(summary.parent / name) for name in names}
    value = {"format": FORMAT, **facts, "files": files, "fingerprints": fingerprints}
    write_json(summary, sealed(value))
    return _result(summary, changed=True)


def _result(summary: Path, changed: bool) -> Result:
    counts = _read_summary(summary)["counts"]
    return Result(sha256_file(summary), {**counts, "changed": changed})


def slice_counts(summary: Path) -> dict[str, int]:
    """Number of documents by split, from the summary of a source's slices or of all slices."""
    return _read_summary(summary)["counts"]


def _read_summary(path: Path) -> dict[str, Any]:
    """Read a summary of slices; summaries of earlier versions have no hash and are not checked."""
    if not path.is_file():
        do = "run nmoe hydra slices"
        code = "E-MANIFEST-MISSING"
        raise FormatError(
            "slices of documents for labels are missing", where=path, do=do, code=code
        )
    return read_summary(path, code="E-SLICE-CHANGED", sealed_since="format")


def _check_digest(path: Path, found: str) -> None:
    """Raise FormatError if the SHA-256 of a slice file differs from the summary beside the file."""
    for summary in (path.with_name(SUMMARY_NAME), path.with_name(COMBINED_NAME)):
        files = _read_summary(summary)["files"] if summary.is_file() else {}
        if files.get(path.name, found) != found:
            raise FormatError(
                "the slice was changed after it was written",
                where=path,
                found=found,
                expected=files[path.name],
                do=f"delete {summary} and run nmoe hydra slices, or name your own file",
                code="E-SLICE-CHANGED",
            )


def read_slice(path: Path) -> list[tuple[str, str]]:
    """The (document id, source) pairs of a slice file. Raises FormatError if the file is missing
    (E-MANIFEST-MISSING), was changed after it was written (E-SLICE-CHANGED), or a line is not a row
    (E-DOCID)."""
    try:
        payload = read_file(path)
    except FileNotFoundError:
        raise FormatError(
            "slice file is missing",
            where=path,
            do="run nmoe hydra slices",
            code="E-MANIFEST-MISSING",
        ) from None
    _check_digest(path, hashlib.sha256(payload).hexdigest())
    return [_slice_row(f"{path}:{i}", line) for i, line in enumerate(payload.splitlines(), 1)]


def _slice_row(where: str, line: bytes) -> tuple[str, str]:
    try:
        row = json_value(line)
        pair = (row["doc_id"], row["source"])
        source = parse_doc_id(pair[0]).source
    except (ValueError, KeyError, TypeError, FormatError):
        raise FormatError(
            "a line is not a row of a slice",
            where=where,
            found=repr(line[:80]),
            expected='{"doc_id": "{source}//{path}#s={start}:e={end}", "source": "{source}"}',
            code="E-DOCID",
        ) from None
    if source != pair[1]:
        raise FormatError(
            "the source of a row differs from its document id",
            where=where,
            found=pair[1],
            code="E-DOCID",
        )
    return pair
