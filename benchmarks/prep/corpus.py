"""The benchmark's input: real text found on this machine as JSON lines, each document once.

Documentation and sources of the packages installed here and in the environments of benchmarks, of
the standard library and of `/usr/share`, and every `.jsonl`, `.jsonl.gz` and `.jsonl.zst` file of a
directory that is named on the command line. Documents are interleaved by the hash of their text, so
every part of the file is like every other.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import orjson

from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.records import Reading, Record

_SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt", ".html", ".h", ".c", ".tex", ".po", ".js"}
_NAMES = {"METADATA", "copyright", "README", "NEWS"}
LONG_CHARS = 4000
_MAX_FILE_BYTES = 1_000_000


def write_corpus(path: Path, max_bytes: int, directory: Path | None, part: str = "all") -> int:
    """Write about `max_bytes` of text, once; return the UTF-8 bytes of text written; `part` may be
    the `short` or the `long` documents.

    A directory of corpora gives as much as it has, up to two thirds.
    """
    size = path.with_suffix(".size")
    if size.exists():
        return int(size.read_text())
    path.parent.mkdir(parents=True, exist_ok=True)
    seen: set[bytes] = set()
    rows: list[tuple[bytes, bytes]] = []
    size_bytes = 0
    for share, texts in ((0.67, _corpora(directory)), (1.0, installed_texts())):
        for text in texts:
            if part != "all" and (part == "long") != (len(text) >= LONG_CHARS):
                continue
            digest = hashlib.sha256(text.encode()).digest()
            if digest in seen:
                continue
            if size_bytes >= share * max_bytes:
                break
            seen.add(digest)
            rows.append((digest, orjson.dumps({"text": text})))
            size_bytes += len(text.encode())
    rows.sort()
    with open(path, "wb") as file:
        file.writelines(row + b"\n" for _, row in rows)
    size.write_text(str(size_bytes))
    return size_bytes


def _corpora(directory: Path | None) -> Iterator[str]:
    if directory is None:
        return
    for file in find_files(["**/*.jsonl*"], directory):
        for block in JsonlSource(Reading("corpus"), [file]).blocks():
            yield from (r.text for r in block.records() if isinstance(r, Record))


def installed_texts() -> Iterator[str]:
    """Text files in the order of a hash of their path, so that a part is a fair sample."""
    roots = [sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), "/usr/share"]
    roots += [str(path) for path in Path("build/bench").glob("**/lib/*/site-packages")]
    files = {
        Path(directory, name)
        for root in roots
        for directory, _, names in os.walk(root)
        for name in names
        if name in _NAMES or os.path.splitext(name)[1] in _SUFFIXES
    }
    for path in sorted(files, key=lambda path: hashlib.md5(os.fsencode(path)).digest()):
        if path.is_symlink() or not 0 < path.stat().st_size <= _MAX_FILE_BYTES:
            continue
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
