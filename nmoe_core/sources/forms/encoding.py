"""Encodings of text files: declared ones are decoded strictly, and `detect` looks at each file.

Detection takes UTF-8 if the bytes are valid UTF-8, else what resiliparse finds in the first 256
KiB; it never looks at names of files, and the result is counted in the manifest.
"""

import codecs
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from nmoe_core.base.errors import SourceError
from nmoe_core.base.jsonl import marked_encoding
from nmoe_core.sources.storage import Read

DETECT = "detect"
HEAD_BYTES = 2**18
_PIECE_BYTES = 2**20


def canonical(name: str) -> str:
    """The one name of an encoding, such as `cp1252`. Raises ValueError unless it is an encoding of
    text."""
    if name == DETECT:
        return name
    try:
        "a".encode(name)  # refuses codecs that do not encode text, such as base64
        return codecs.lookup(name).name
    except (LookupError, ValueError):
        raise ValueError(f"{name!r} is not the name of an encoding") from None


def version_of(package: str) -> str:
    """A package with its version, as fingerprints record it."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def missing_extra(what: str, where: str) -> SourceError:
    """The error if a package of the extra `web` is not installed."""
    return SourceError(
        f"{what} needs another package",
        where=where,
        do="pip install 'nmoe-data[web]'",
        code="E-SOURCE-EXTRA",
    )


def encoding_of(head: bytes, encoding: str, where: str) -> str:
    """The encoding of a file that starts with `head`.

    Args:
        head: The first bytes, up to HEAD_BYTES.
        encoding: A name, which is returned unless it is `detect`, or `utf-8` and the file has
            a byte order mark of another encoding.
        where: The file, for errors.

    Raises:
        SourceError: No encoding fits (E-SOURCE-ENCODING), or resiliparse is not installed
            (E-SOURCE-EXTRA).
    """
    if encoding not in (DETECT, "utf-8"):
        return encoding
    marked = marked_encoding(head)
    if encoding != DETECT or marked != "utf-8":
        return marked
    with_rest = codecs.getincrementaldecoder("utf-8")()
    try:
        with_rest.decode(head, final=len(head) < HEAD_BYTES)
        return "utf-8"
    except UnicodeDecodeError:
        pass
    found = _guessed(head, where)
    if found is None:
        raise SourceError(
            "no encoding of text fits this file",
            where=where,
            do="name its encoding, or leave it out with `exclude`",
            code="E-SOURCE-ENCODING",
        )
    return found


def _guessed(head: bytes, where: str) -> str | None:
    """The encoding of bytes that are not UTF-8; None if none is found."""
    if b"\0" in head:  # each second byte of UTF-16 is zero, in the scripts of Europe
        zeros = [head[place::2].count(0) for place in (0, 1)]
        is_wide = min(zeros) == 0 and 8 * max(zeros) > len(head)
        names = ("utf-16-be", "utf-16-le")
        return names[zeros.index(max(zeros))] if is_wide else None
    try:
        from resiliparse.parse.encoding import detect_encoding
    except ImportError as error:
        raise missing_extra("detection of encodings", where) from error
    found = detect_encoding(head)
    return None if found is None or canonical(found) == "utf-8" else canonical(found)


def as_utf8(read: Read, encoding: str, where: str) -> Iterator[bytes]:
    """The text of `read` in UTF-8, in pieces that are not empty. Raises SourceError, which names
    the file and the byte in it, if bytes do not belong to the encoding (E-SOURCE-ENCODING)."""
    decoder = codecs.getincrementaldecoder(encoding)()
    offset = 0
    payload = b"-"
    while payload:
        payload = read(_PIECE_BYTES)
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(payload, final=not payload)
        except UnicodeDecodeError as error:
            found = error.object[error.start : error.start + 1]
            raise not_of(encoding, where, offset - pending + error.start, found) from error
        offset += len(payload)
        if text:
            yield text.encode("utf-8", "surrogatepass")


def not_of(encoding: str, where: str, offset: int, found: bytes) -> SourceError:
    """The error for bytes that do not belong to an encoding."""
    return SourceError(
        f"bytes do not belong to the encoding {encoding}",
        where=f"{where}: byte {offset}",
        found=f"0x{found.hex()}",
        do='set encoding of this source to that of its files, or to "detect"',
        code="E-SOURCE-ENCODING",
    )
