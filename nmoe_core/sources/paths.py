"""Turns path patterns into a sorted list of files with stable relative names.

Patterns take `*`, `**`, `?`, braces `{a,b}` and `{1..8}`, and the placeholders `{stdlib}` and
`{site_packages}` at their start for the directories of the running Python. A file's name is
relative to the directory that all patterns of a source share, so ids do not depend on where a tree
lies; bytes of a name that are not UTF-8 are spelled `\\xff`. Two files never get one name.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from nmoe_core.errors import SourceError

_BRACES = re.compile(r"\{([^{}]*(?:,|\.\.)[^{}]*)\}")
_PLACEHOLDERS = {"{stdlib}/": "stdlib", "{site_packages}/": "purelib"}


class SourceFile(NamedTuple):
    """A file and its name in ids."""

    path: Path
    name: str

    @property
    def where(self) -> str:
        """The path as text that can be printed, whatever bytes it holds."""
        return path_text(self.path)


def find_files(
    patterns: Sequence[str], base: Path, exclude: Sequence[str] = ()
) -> list[SourceFile]:
    """All files the patterns match, by name, each once.

    Args:
        patterns: Paths or globs; relative ones start at `base`.
        exclude: Globs over the names of files to leave out.

    Raises:
        SourceError: A pattern matches no file (E-SOURCE-NOTFOUND), or two files get one name
            (E-SOURCE-DUPLICATE).
    """
    tops: list[str] = []
    found: dict[Path, None] = {}
    for pattern in patterns:
        for expanded in expand_braces(pattern):
            root, rest = _rooted(expanded, base)
            matches = _matches(root, rest)
            if not matches:
                raise SourceError(
                    "no such file",
                    where=pattern,
                    found=str(root / rest),
                    expected="at least one file",
                    do="correct the path of this source",
                    code="E-SOURCE-NOTFOUND",
                )
            tops.append(_fixed_directory(root, rest))
            found.update(dict.fromkeys(matches))
    files = [f for f in _named(found, os.path.commonpath(tops)) if not _excluded(f.name, exclude)]
    return sorted(files, key=lambda file: file.name)


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


def path_text(path: Path) -> str:
    """A path as text; bytes that are not UTF-8 become `\\xff`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


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


def _rooted(pattern: str, base: Path) -> tuple[Path, str]:
    """The directory that a pattern starts at, and the rest of the pattern."""
    for mark, key in _PLACEHOLDERS.items():
        if pattern.startswith(mark):
            return Path(sysconfig.get_path(key)), pattern.removeprefix(mark)
    return base, pattern


def _matches(root: Path, pattern: str) -> list[Path]:
    # root_dir keeps glob characters of the directory's own name out of the pattern.
    is_glob = glob.has_magic(pattern)
    names = glob.iglob(pattern, root_dir=root, recursive=True) if is_glob else [pattern]
    return [path for path in (root / name for name in names) if path.is_file()]


def _fixed_directory(root: Path, pattern: str) -> str:
    parts = Path(pattern).parts
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return os.path.abspath(root.joinpath(*parts[:fixed]))


def _named(paths: Iterable[Path], top: str) -> list[SourceFile]:
    files: dict[str, SourceFile] = {}
    for path in paths:
        file = SourceFile(path, path_text(Path(os.path.abspath(path)).relative_to(top)))
        other = files.setdefault(file.name, file)
        if other is not file:
            raise SourceError(
                f"two files have the name {file.name!r}",
                where=other.where,
                found=file.where,
                do="rename one of them, or name each file once",
                code="E-SOURCE-DUPLICATE",
            )
    return list(files.values())


def _excluded(name: str, exclude: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in exclude)
