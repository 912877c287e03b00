"""Turns path patterns into a sorted list of files with stable relative names.

Patterns take `*`, `**`, `?`, braces `{a,b}` and `{1..8}`, and the placeholders `{stdlib}` and
`{site_packages}` for the directories of the running Python. A file's name is relative to the
pattern's fixed part, so ids do not depend on where a tree lies.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nmoe_core.errors import SourceError

_BRACES = re.compile(r"\{([^{}]*(?:,|\.\.)[^{}]*)\}")


class SourceFile(NamedTuple):
    """A file and its name in ids."""

    path: Path
    name: str


def find_files(
    patterns: Sequence[str], base: Path, exclude: Sequence[str] = ()
) -> list[SourceFile]:
    """All files the patterns name, by name, each once.

    Args:
        patterns: Paths or globs; relative ones start at `base`.
        exclude: Globs over the names of files to leave out.

    Raises:
        SourceError: A pattern matches no file (E-SOURCE-NOTFOUND).
    """
    found: dict[Path, str] = {}
    for pattern in patterns:
        for expanded in expand_braces(_placeholders(pattern)):
            matches = _matches(base, expanded)
            if not matches:
                raise SourceError(
                    "no such file",
                    where=pattern,
                    found=str(base / expanded),
                    expected="at least one file",
                    do="correct the path of this source",
                    code="E-SOURCE-NOTFOUND",
                )
            for path, name in matches:
                found.setdefault(path, name)
    files = sorted((name, path) for path, name in found.items() if not _excluded(name, exclude))
    return [SourceFile(path, name) for name, path in files]


def expand_braces(pattern: str) -> list[str]:
    """Expand `{a,b}` and `{1..8}` (zero padding kept), leftmost first.

    >>> expand_braces("x_{01..03}.{json,gz}")[:2]
    ['x_01.json', 'x_01.gz']
    """
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [out for item in _items(match[1]) for out in expand_braces(head + item + tail)]


def sample_files(files: Sequence[SourceFile], max_bytes: int, seed: int) -> list[SourceFile]:
    """A seeded sample of whole files of about `max_bytes` in all, in the order given."""
    ranked = sorted(files, key=lambda f: hashlib.md5(f"{seed}:{f.name}".encode()).digest())
    taken: set[str] = set()
    size_bytes = 0
    for file in ranked:
        file_bytes = file.path.stat().st_size
        if size_bytes + file_bytes <= max_bytes:
            taken.add(file.name)
            size_bytes += file_bytes
    return [file for file in files if file.name in taken]


def _items(body: str) -> list[str]:
    span = re.fullmatch(r"(\d+)\.\.(\d+)", body)
    if span is None:
        return body.split(",")
    width = len(span[1]) if span[1].startswith("0") else 0
    return [str(n).zfill(width) for n in range(int(span[1]), int(span[2]) + 1)]


def _placeholders(pattern: str) -> str:
    paths = {
        "{stdlib}": sysconfig.get_path("stdlib"),
        "{site_packages}": sysconfig.get_path("purelib"),
    }
    for mark, value in paths.items():
        pattern = pattern.replace(mark, value)
    return pattern


def _matches(base: Path, pattern: str) -> list[tuple[Path, str]]:
    full = base / pattern
    parts = full.parts
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    top = Path(*parts[:fixed])
    if glob.has_magic(str(full)):
        paths = [Path(p) for p in glob.iglob(str(full), recursive=True)]
    else:
        paths = [full]
    return [(path, path.relative_to(top).as_posix()) for path in paths if path.is_file()]


def _excluded(name: str, exclude: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in exclude)
