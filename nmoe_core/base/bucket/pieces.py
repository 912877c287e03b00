"""The pieces of unfinished files: objects that are named by the writer's turn and the offset.

Each writer takes the turn after the last one that it finds, and first sends again what it
continues. So pieces of two writers are never joined, even if one of them was only paused.
"""

import posixpath

from loader.files.addresses import join
from loader.files.stores import store
from loader.files.stores.objects import OWN
from nmoe_core.base.bucket.scope import Scope

DRAFTS = f"{OWN}/drafts"


class Pieces:
    """The unfinished files below a URL; paths are relative to it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._turns: dict[str, int] = {}
        self._with_pieces: set[str] = set()

    def send(self, path: str, offset: int, piece: bytes) -> None:
        """Send the bytes of a file from `offset` on."""
        if path not in self._turns:
            self.spans(path)
        turn = self._turns[path]
        self._with_pieces.add(path)
        store.write(f"{self._of(path)}/{turn:06d}-{offset:016d}", piece)

    def spans(self, path: str) -> list[tuple[str, int, int]]:
        """Name, start and end of each piece of the last writer, in order; takes the next turn."""
        found = [one for one in store.listing(self._of(path)) if one.path.count("-") == 1]
        last = max((one.path.partition("-")[0] for one in found), default="0")
        self._turns[path] = int(last) + 1
        if found:
            self._with_pieces.add(path)
        spans = []
        for one in sorted(found):
            turn, _, offset = one.path.partition("-")
            if turn == last:
                spans.append((one.path, int(offset), int(offset) + one.size_bytes))
        return spans

    def read(self, path: str, name: str) -> bytes | None:
        """A piece; None if it was removed."""
        return store.read_bytes(f"{self._of(path)}/{name}")

    def files(self, directory: str) -> list[str]:
        """Unfinished files below a directory, relative to it."""
        return sorted({posixpath.dirname(one.path) for one in store.listing(self._of(directory))})

    def remove(self, scope: Scope) -> None:
        """Remove the pieces of a scope's files, which are committed now."""
        for path in [one for one in self._turns if scope.has_draft(one)]:
            if path in self._with_pieces:
                for piece in list(store.listing(self._of(path))):
                    store.remove(f"{self._of(path)}/{piece.path}")
                self._with_pieces.remove(path)
            del self._turns[path]

    def _of(self, path: str) -> str:
        return join(self._url, f"{DRAFTS}/{path}")
