"""Resolves path patterns to a sorted list of files with stable relative names.

Patterns support `*`, `**`, `?`, and braces `{a,b}` and `{1..8}`, on this machine and in any store
that fsspec supports (`s3://bucket/{a,b}/**/*.parquet`). They may start with `{stdlib}` or
`{site_packages}`, the directories of the running Python. A file's name is relative to the directory
that all patterns of a source share, so ids do not depend on where the directory is. Bytes of a name
that are not UTF-8 are written as `\\xff`. Two files never have the same name.
"""

import fnmatch
import glob
import hashlib
import os
import posixpath
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nmoe_core.base.errors import SourceError
from nmoe_core.sources.links import Directories, Links
from nmoe_core.sources.storage import SourceFile, file_system, is_url, path_text, store_errors

_BRACES = re.compile(r"\{(?=[^{}]*(?:,|\.\.))([^{}]*)\}")
_PLACEHOLDERS = {"{stdlib}/": "stdlib", "{site_packages}/": "purelib"}
_LOCAL_URL = re.compile("^(file|local)://")
_MAX_EXPANSIONS = 100_000
_MAX_CHARS = 2**16


def find_files(
    patterns: Sequence[str], base: Path, exclude: Sequence[str] = (), *, follow_links: bool = False
) -> list[SourceFile]:
    """All files that match the patterns, sorted by name, without files that match `exclude`. Raises
    SourceError if a pattern matches no file (E-SOURCE-NOTFOUND), two files have the same name
    (E-SOURCE-DUPLICATE), links below `**` form a loop (E-SOURCE-LOOP) or lead out of the named
    directories (E-SOURCE-LINK; see `Links`), the patterns name several stores (E-SOURCE-PATTERN),
    or a store cannot be read (E-SOURCE-NETWORK, E-SOURCE-EXTRA)."""
    for pattern in patterns:
        if not pattern or "\0" in pattern:
            raise SourceError("not a path", found=repr(pattern), code="E-SOURCE-PATTERN")
    expanded = [(p, one) for p in patterns for one in expand_braces(_LOCAL_URL.sub("", p))]
    is_remote = any(is_url(one) for _, one in expanded)
    links = Links(follow_links)
    found = _remote_files(expanded) if is_remote else _local_files(expanded, base, links)
    files: dict[str, SourceFile] = {}
    for file in found:
        other = files.setdefault(file.name, file)
        if other is not file:
            raise SourceError(
                f"two files have the name {file.name!r}",
                where=other.where,
                found=file.where,
                do="rename one of them, or name each file only once",
                code="E-SOURCE-DUPLICATE",
            )
    names = [name for name in files if not any(fnmatch.fnmatch(name, one) for one in exclude)]
    chosen = [files[name] for name in sorted(names)]
    links.refuse(file.path for file in chosen if file.is_local)
    return chosen


def expand_braces(pattern: str) -> list[str]:
    """Expand `{a,b}` and `{1..8}` (zero padding kept, `{8..1}` counts down), leftmost first.

    Braces without a comma or a range, and unbalanced braces, are literal.

    >>> expand_braces("x_{01..03}.{json,gz}")[:2]
    ['x_01.json', 'x_01.gz']

    Raises:
        SourceError: The pattern has more than 65,536 characters, or the result more than 100,000
            patterns (E-SOURCE-PATTERN).
    """
    done: list[str] = []
    waiting = [pattern]
    while waiting:
        first = waiting.pop()
        match = _BRACES.search(first)
        if match is None:
            done.append(first)
        else:
            head = first[: match.start()]
            tail = first[match.end() :]
            waiting += [head + item + tail for item in reversed(_items(match[1], pattern))]
        if len(done) + len(waiting) > _MAX_EXPANSIONS or len(pattern) > _MAX_CHARS:
            raise _too_many(pattern)
    return list(dict.fromkeys(done))


def sample_files(files: Sequence[SourceFile], max_bytes: int, seed: int) -> list[SourceFile]:
    """A seeded sample of whole files of about `max_bytes` in total, in the given order."""
    ranked = sorted(files, key=lambda f: hashlib.md5(f"{seed}:{f.name}".encode()).digest())
    taken: set[str] = set()
    size_bytes = 0
    for file in ranked:
        file_bytes = file.size_bytes()
        if size_bytes + file_bytes <= max_bytes:
            taken.add(file.name)
            size_bytes += file_bytes
    return [file for file in files if file.name in taken]


def _items(body: str, pattern: str) -> list[str]:
    span = re.fullmatch(r"(\d+)\.\.(\d+)", body)
    if span is None:
        return body.split(",")
    if max(len(span[1]), len(span[2])) > 18:
        raise _too_many(pattern)
    start = int(span[1])
    stop = int(span[2])
    if abs(stop - start) >= _MAX_EXPANSIONS:
        raise _too_many(pattern)
    is_padded = any(len(end) > 1 and end.startswith("0") for end in (span[1], span[2]))
    width = max(len(span[1]), len(span[2])) if is_padded else 0
    step = 1 if stop >= start else -1
    return [str(n).zfill(width) for n in range(start, stop + step, step)]


def _too_many(pattern: str) -> SourceError:
    return SourceError(
        "pattern expands to too many names",
        where=pattern[:200],
        expected=f"at most {_MAX_EXPANSIONS:,}",
        do="use * instead of the numbers",
        code="E-SOURCE-PATTERN",
    )


def _nothing_found(pattern: str, place: str) -> SourceError:
    return SourceError(
        "no such file",
        where=pattern,
        expected=f"at least one file at {place}",
        do="correct the path of this source",
        code="E-SOURCE-NOTFOUND",
    )


def _local_files(
    expanded: Sequence[tuple[str, str]], base: Path, links: Links
) -> Iterator[SourceFile]:
    tops: list[str] = []
    places: list[tuple[Path, str]] = []
    for _, one in expanded:
        root = base
        rest = one
        for mark, key in _PLACEHOLDERS.items():
            if one.startswith(mark):
                root = Path(sysconfig.get_path(key))
                rest = one.removeprefix(mark)
        parts = Path(rest).parts
        places.append((root, rest))
        tops.append(os.path.abspath(root.joinpath(*parts[: _num_fixed(parts)])))
        if (path := root / rest).is_file():  # a name without a pattern may have any character
            links.named.add(os.fspath(path))
        else:
            links.tops.add(os.path.realpath(tops[-1]))
    found: dict[str, None] = {}
    directories = Directories(links)
    for (pattern, _), (root, rest) in zip(expanded, places):
        path = root / rest
        if os.fspath(path) in links.named:
            matches = [os.fspath(path)]
        else:
            matches = directories.files(root, rest) if glob.has_magic(rest) else []
        if not matches:
            raise _nothing_found(pattern, str(path))
        found.update(dict.fromkeys(matches))
    top = os.path.commonpath(tops) if tops else ""
    for path in found:
        name = os.path.abspath(path).removeprefix(top).lstrip("/")
        yield SourceFile(Path(path), path_text(name))


def _num_fixed(parts: Sequence[str]) -> int:
    """Number of leading directories of a pattern without wildcards."""
    return next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)


def _remote_files(expanded: Sequence[tuple[str, str]]) -> Iterator[SourceFile]:
    stores = {urlsplit(one).scheme if is_url(one) else "this machine" for _, one in expanded}
    if len(stores) > 1:
        raise SourceError(
            "one source has paths in several stores",
            where=expanded[0][0],
            found=", ".join(sorted(stores)),
            do="make one source per store",
            code="E-SOURCE-PATTERN",
        )
    tops: list[str] = []
    found: dict[str, str] = {}
    for pattern, one in expanded:
        fs, key = file_system(one)
        is_glob = glob.has_magic(key)
        with store_errors(pattern):
            keys = fs.glob(key, detail=True) if is_glob else {key: {"type": _type(fs, key)}}
        matches = sorted(str(k) for k, info in keys.items() if info["type"] == "file")
        if not matches:
            raise _nothing_found(pattern, one)
        parts = key.split("/")
        tops.append("/".join(parts[: _num_fixed(parts)]) or "/")
        found |= {match: str(fs.unstrip_protocol(match)) for match in matches}
    top = posixpath.commonpath(tops)
    for key, url in found.items():
        yield SourceFile(url, posixpath.relpath(key, top))


def _type(fs: Any, key: str) -> str:
    # Not fs.isfile, which reports a missing file if the store does not answer.
    try:
        return str(fs.info(key)["type"])
    except FileNotFoundError as error:
        # over HTTP, this means that the server did not answer
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        return "absent"
