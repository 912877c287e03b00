"""The index of a curated shard: the suffix arrays of its token files, and their inputs.

`seen/{source}/shard_NNNN/index.json` names the files beside it. The names of these files contain
the digest of the indexed tokens. So the files of an earlier index stay unchanged until the summary
of the new index is committed. The index takes four bytes per token.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from loader.files.format import Manifest, ShardEntry, check_digest, load_manifest
from loader.files.regular import regular
from nmoe_core.audit.seen import SEEN_CODE
from nmoe_core.base.atomic import atomic_file, output_lock, write_json
from nmoe_core.base.bucket.paths import shown
from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import (
    Fingerprints,
    local_digest,
    read_sealed,
    seal_summary,
    sha256_json,
)
from nmoe_core.base.result import Result
from nmoe_core.config.tree import ShardPaths
from nmoe_core.shards.documents import ShardFile, open_entry
from nmoe_core.shards.manifest import documents_digest
from nmoe_core.shards.suffixes import parts, suffix_array
from nmoe_core.text.tokenizer import Tokenizer

_DO = "run `nmoe seen --index`"


@dataclass(frozen=True, slots=True)
class Part:
    """Successive complete documents of a token file, and the order of their suffixes.

    tokens, suffixes: `[num_tokens]` each, mapped; a suffix is an index into `tokens`.
    """

    shard: ShardPaths
    file: ShardFile
    path: Path
    """The file of the suffixes."""
    start: int
    """Offset of the first token in the token file."""
    tokens: memoryview
    suffixes: memoryview

    @property
    def token_file(self) -> Path:
        return self.shard.tree.curated / self.file.rel


def index_shard(shard: ShardPaths, part_tokens: int) -> Result:
    """Write the index of a curated shard. If the index is current, it is not written again; the
    suffix arrays of unchanged token files are reused. The largest part determines the memory; see
    `suffixes`.

    Raises:
        FormatError: The curated shard is missing or broken, or too large (E-SEEN-SIZE).
        LockedError: Another process is writing this index.
        ConfigError: The extra `seen` is not installed (E-CONFIG-EXTRA).
    """
    with output_lock(shard.seen):
        manifest = load_manifest(shard.curated_manifest)
        old = read_sealed(shard.seen_index) or {}
        known = {row["suffixes"]: row for row in old.get("files", [])}
        rows = []
        made = 0
        for entry in manifest.shards:
            row = known.get(_name(entry))
            if row is None or _problem(shard.seen, entry, row):
                row = _write(shard, manifest, entry, part_tokens)
                made += 1
            rows.append(row)
        summary = {"fingerprints": index_fingerprints(manifest), "files": rows}
        changed = old != summary | {"schema_version": 1}
        if changed:
            write_json(shard.seen_index, seal_summary(summary))
        for path in shard.seen.glob("*.sa"):
            if path.name not in {row["suffixes"] for row in rows}:
                path.unlink()
    facts = {
        "documents": manifest.total_documents,
        "tokens": manifest.total_tokens,
        "bytes": sum(4 * entry.num_tokens for entry in manifest.shards),
        "files_sorted": made,
        "changed": changed,
        "path": shown(shard.seen_index),
    }
    return Result(sha256_json(summary), facts)


def open_index(shard: ShardPaths, tokenizer: Tokenizer) -> Iterator[Part]:
    """The parts of a shard's index. Raises FormatError if the index is missing (E-SEEN-MISSING),
    belongs to another version of the curated shard or the shard has another tokenizer than the run
    (E-SEEN-STALE), or if the index is damaged (E-SEEN-CHANGED)."""
    manifest = load_manifest(shard.curated_manifest)
    path = shard.seen_index
    given = manifest.extra.get("tokenizer_fingerprint") or tokenizer.fingerprint
    read_as = given, manifest.eos_token_id, manifest.extra.get("bos_token_id")
    if read_as != (tokenizer.fingerprint, tokenizer.eos_token_id, tokenizer.bos_token_id):
        what = "the tokenizer of the shard differs from the tokenizer of the run"
        do = "set [prep] tokenizer to the tokenizer of the shards"
        path = shard.curated_manifest
        found = f"tokenizer {manifest.tokenizer}"
        raise FormatError(what, where=path, found=found, do=do, code="E-SEEN-STALE")
    summary = read_sealed(path)
    if summary is None:
        is_there = path.exists()
        what = "the index was edited or damaged" if is_there else "the shard has no index"
        raise _refused(what, path, None, "E-SEEN-CHANGED" if is_there else "E-SEEN-MISSING")
    found = summary["fingerprints"]
    if found != index_fingerprints(manifest):
        what = "the index belongs to another version of the curated shard"
        raise _refused(what, path, found.get("curated"), "E-SEEN-STALE")
    for entry, row in zip(manifest.shards, summary["files"], strict=True):
        suffixes = shard.seen / row["suffixes"]
        if problem := _problem(shard.seen, entry, row):
            raise _refused("the index was edited or damaged", suffixes, problem, "E-SEEN-CHANGED")
        file = open_entry(shard.tree.curated, manifest, entry)
        order = np.memmap(regular(suffixes), "<u4", "r").data
        tokens = file.tokens.data
        for start, end in row["parts"]:
            yield Part(shard, file, suffixes, start, tokens[start:end], order[start:end])


def index_fingerprints(manifest: Manifest) -> Fingerprints:
    return {"code": SEEN_CODE, "curated": documents_digest(manifest)}


def _name(entry: ShardEntry) -> str:
    return f"{PurePosixPath(entry.path).stem}-{entry.checksum[:16]}.sa"


def _problem(directory: Path, entry: ShardEntry, row: dict[str, Any]) -> str | None:
    """The problem of the file of a row; None if the file is unchanged."""
    path = directory / row["suffixes"]
    if row["checksum"] != entry.checksum:
        return "an index of tokens that differ"
    if not path.is_file() or path.stat().st_size != 4 * entry.num_tokens:
        return "a missing file, or a file of the wrong size"
    return None if local_digest(path) == row["sha256"] else "other bytes than the recorded ones"


def _write(
    shard: ShardPaths, manifest: Manifest, entry: ShardEntry, part_tokens: int
) -> dict[str, Any]:
    check_digest(manifest.shard_path(entry), entry.checksum, "E-SHARD-CHECKSUM")
    file = open_entry(shard.tree.curated, manifest, entry)
    digest = hashlib.sha256()
    found = parts(file.spans, part_tokens)
    with atomic_file(shard.seen / _name(entry)) as out:
        for start, end in found:
            payload = suffix_array(file.tokens[start:end]).data.cast("B")
            digest.update(payload)
            out.write(payload)
    return {
        "suffixes": _name(entry),
        "checksum": entry.checksum,
        "sha256": digest.hexdigest(),
        "parts": [list(part) for part in found],
    }


def _refused(what: str, where: Path, found: str | None, code: str) -> FormatError:
    return FormatError(what, where=where, found=found, do=_DO, code=code)
