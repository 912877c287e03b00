"""Finds the files that match patterns, and refuses symbolic links that lead out of their
directories.

The result is the same as with `glob`, but each directory is read once for all patterns of a source.
`**` matches directories at any depth that are not hidden; links below it must not form a loop.

An untrusted directory may contain a link to a secret file of this machine, so links that lead out
of the directory are refused unless the source sets `follow_links`. A file or directory may be a
link if a path names it directly. System files such as /proc are always refused.
"""

import fnmatch
import glob
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from nmoe_core.base.errors import SourceError
from nmoe_core.sources.storage import path_text

_SYSTEM = ("/proc/", "/sys/", "/dev/")
_MEMORY = "/dev/shm/"  # ordinary files


class Links:
    """The allowed locations of a source's files: below `tops`; files that a path names directly
    (`named`) may be anywhere."""

    def __init__(self, are_followed: bool) -> None:
        self.tops: set[str] = set()
        self.named: set[str] = set()
        self._are_followed = are_followed
        self._targets: dict[str, str] = {}

    def lead_out(self, path: str | Path) -> bool:
        """Whether a path leads out of the allowed directories. Raises SourceError if it leads to
        system files (E-SOURCE-LINK)."""
        path = os.fspath(path)
        target = self._target(path)
        if f"{target}/".startswith(_SYSTEM) and not f"{target}/".startswith(_MEMORY):
            what = "system files about processes and devices are not read"
            raise _refusal(what, path, target, "remove the link")
        return not (self._are_followed or path in self.named or is_below(target, self.tops))

    def refuse(self, paths: Iterable[str | Path]) -> None:
        """Raise SourceError if a path leads out of the allowed directories (E-SOURCE-LINK)."""
        if found := [path for path in paths if self.lead_out(path)]:
            what = f"symbolic links ({len(found)} in total) lead out of the directory of the source"
            do = "remove them, name their targets, or set follow_links = true for this source"
            raise _refusal(what, found[0], self._target(os.fspath(found[0])), do)

    def _target(self, path: str) -> str:
        if path not in self._targets:
            above, name = os.path.split(path)
            is_plain = above != path and name not in ("", ".", "..") and not os.path.islink(path)
            if is_plain:  # the common case costs one system call
                self._targets[path] = os.path.join(self._target(above), name)
            else:
                self._targets[path] = os.path.realpath(path)
        return self._targets[path]


def is_below(path: str, tops: set[str]) -> bool:
    """Whether an absolute path is one of `tops`, or below one of them."""
    while path not in tops and path != (above := os.path.dirname(path)):
        path = above
    return path in tops


def _refusal(what: str, path: str | Path, target: str, do: str) -> SourceError:
    where = path_text(Path(path))
    found = path_text(Path(target))
    return SourceError(what, where=where, found=found, do=do, code="E-SOURCE-LINK")


class _Names(NamedTuple):
    """The entries of a directory."""

    files: list[str]
    directories: list[str]


class Directories:
    """The directories of a source, read once when a pattern reaches them."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._names: dict[str, _Names] = {}
        self._trees: dict[str, list[str]] = {}

    def files(self, root: Path, pattern: str) -> list[str]:
        """The files below `root` that match a pattern with wildcards. Raises SourceError if links
        below `**` form a loop (E-SOURCE-LOOP) or lead out (E-SOURCE-LINK)."""
        *parents, name = Path(pattern).parts
        if name == "**":
            parents.append(name)
            name = "*"
        places = [os.fspath(root)]  # glob characters in the name of `root` are literal
        for part in parents:
            places = [found for place in places for found in self._directories(place, part)]
        if not glob.has_magic(name):
            paths = [os.path.join(place, name) for place in places]
            return [path for path in paths if os.path.isfile(path)]
        matching: list[str] = []
        for place in places:
            files = _matching(self._read(place).files, name)
            matching += [os.path.join(place, file) for file in files]
        return matching

    def _directories(self, place: str, part: str) -> list[str]:
        """The directories that match a part of a pattern (not its last part)."""
        if part == "**":
            return self._tree(place)
        if glob.has_magic(part):
            found = _matching(self._read(place).directories, part)
            return [os.path.join(place, name) for name in found]
        path = os.path.join(place, part)
        return [path] if os.path.isdir(path) else []

    def _tree(self, top: str) -> list[str]:
        """A directory and all directories below it."""
        if top in self._trees:
            return self._trees[top]
        leading_out: list[str] = []
        tree = self._trees[top] = []
        waiting: list[tuple[str, frozenset[tuple[int, int]]]] = [(top, frozenset())]
        while waiting:
            path, above = waiting.pop()
            if self._links.lead_out(path):  # the link may lead to any directory of the machine
                leading_out.append(path)
                continue
            try:
                status = os.stat(path)
            except OSError:  # the directory was deleted in the meantime
                continue
            identity = (status.st_dev, status.st_ino)
            if identity in above:
                raise SourceError(
                    "a symbolic link leads to a directory above itself",
                    where=path_text(path),
                    found=path_text(os.path.realpath(path)),
                    do="remove the link, or name the directories instead of **",
                    code="E-SOURCE-LOOP",
                )
            above |= {identity}
            tree.append(path)
            below = _matching(self._read(path).directories, "*")
            waiting += [(os.path.join(path, name), above) for name in below]
        self._links.refuse(sorted(leading_out))
        return tree

    def _read(self, path: str) -> _Names:
        if path not in self._names:
            names = self._names[path] = _Names([], [])
            with suppress(OSError):  # glob also skips a directory that cannot be read
                for entry in os.scandir(path):
                    # A system call is needed only for links.
                    is_link = entry.is_symlink()
                    if os.path.isdir(entry.path) if is_link else entry.is_dir():
                        names.directories.append(entry.name)
                    elif os.path.isfile(entry.path) if is_link else entry.is_file():
                        names.files.append(entry.name)
        return self._names[path]


def _matching(names: list[str], pattern: str) -> list[str]:
    """Names that match; hidden names only if the pattern starts with a dot."""
    found = fnmatch.filter(names, pattern)
    return found if pattern.startswith(".") else [n for n in found if not n.startswith(".")]
