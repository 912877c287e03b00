"""Symbolic links of a source that lead out of the directories which its patterns name.

A tree of strangers may hold a link to a secret of this machine, so such a link is refused unless
the source says `follow_links`. Who names a file itself, or a directory that is a link, means what
it leads to. What the system tells of itself and of its processes is never text.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from nmoe_core.base.errors import SourceError
from nmoe_core.sources.storage import path_text

_SYSTEM = ("/proc/", "/sys/", "/dev/")
_MEMORY = "/dev/shm/"  # files like any others


class Links:
    """Where the files of a source may lie: below `tops`; those that are `named`, anywhere."""

    def __init__(self, are_followed: bool) -> None:
        self.tops: set[str] = set()
        self.named: set[str] = set()
        self._are_followed = are_followed
        self._targets: dict[str, str] = {}

    def lead_out(self, path: str | Path) -> bool:
        """Whether a path may not be read. Raises SourceError: it leads to what the system tells of
        itself (E-SOURCE-LINK)."""
        path = os.fspath(path)
        target = self._target(path)
        if f"{target}/".startswith(_SYSTEM) and not f"{target}/".startswith(_MEMORY):
            what = "what the system tells of itself and of its processes is not read"
            raise _refusal(what, path, target, "remove the link")
        return not (self._are_followed or path in self.named or is_below(target, self.tops))

    def refuse(self, paths: Iterable[str | Path]) -> None:
        """Refuse those of the paths that lead out. Raises SourceError (E-SOURCE-LINK)."""
        if found := [path for path in paths if self.lead_out(path)]:
            what = f"symbolic links ({len(found)} in all) lead out of the directory of the source"
            do = "remove them, name what they lead to, or set follow_links = true for this source"
            raise _refusal(what, found[0], self._target(os.fspath(found[0])), do)

    def _target(self, path: str) -> str:
        if path not in self._targets:
            above, name = os.path.split(path)
            is_plain = above != path and name not in ("", ".", "..") and not os.path.islink(path)
            if is_plain:  # most are, and cost one system call
                self._targets[path] = os.path.join(self._target(above), name)
            else:
                self._targets[path] = os.path.realpath(path)
        return self._targets[path]


def is_below(path: str, tops: set[str]) -> bool:
    """Whether an absolute path is one of these, or below one."""
    while path not in tops and path != (above := os.path.dirname(path)):
        path = above
    return path in tops


def _refusal(what: str, path: str | Path, target: str, do: str) -> SourceError:
    where, found = path_text(Path(path)), path_text(Path(target))
    return SourceError(what, where=where, found=found, do=do, code="E-SOURCE-LINK")
