"""The pieces of unfinished files: objects that are named by their offset in the file."""

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
        self._seen: set[str] = set()

    def send(self, path: str, offset: int, piece: bytes) -> None:
        """Send the bytes of a file from `offset` on."""
        store.write(f"{self._of(path)}/{offset:016d}", piece)
        self._seen.add(path)

    def spans(self, path: str) -> list[tuple[int, int]]:
        """Start and end of each piece of a file, in order."""
        found = [one for one in store.listing(self._of(path)) if one.path.isdecimal()]
        self._seen.update([path] * bool(found))
        return sorted((int(one.path), int(one.path) + one.size_bytes) for one in found)

    def read(self, path: str, offset: int) -> bytes | None:
        """The piece at an offset; None if it was removed."""
        return store.read_bytes(f"{self._of(path)}/{offset:016d}")

    def files(self, directory: str) -> list[str]:
        """Unfinished files below a directory, relative to it."""
        return sorted({posixpath.dirname(one.path) for one in store.listing(self._of(directory))})

    def remove(self, scope: Scope) -> None:
        """Remove the pieces of a scope's files, which are committed now."""
        for path in [one for one in self._seen if scope.has_draft(one)]:
            for piece in list(store.listing(self._of(path))):
                store.remove(f"{self._of(path)}/{piece.path}")
            self._seen.discard(path)

    def _of(self, path: str) -> str:
        return join(self._url, f"{DRAFTS}/{path}")
