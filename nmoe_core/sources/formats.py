"""Derives format, compression and split from the name of a file."""

import re
from pathlib import PurePath
from typing import Literal

from nmoe_core.base.jsonl import COMPRESSED
from nmoe_core.sources.spec import SourceKind

KINDS: dict[str, SourceKind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".csv": "csv",
    ".tsv": "csv",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".warc": "warc",
    ".wet": "wet",
    ".txt": "files",
    ".md": "files",
    ".rst": "files",
    ".tex": "files",
}
Split = Literal["train", "valid", "test"]
EXPECTED = f"{', '.join(KINDS)}, also {', '.join(COMPRESSED)}"
_ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")
# Split names as on the hub; in a file name they must be separated by digits or punctuation.
_SPLITS: dict[str, Split] = {"train": "train", "training": "train"}
_SPLITS |= dict.fromkeys(("validation", "valid", "val", "dev"), "valid")
_SPLITS |= dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")
_WORD = re.compile(r"[^\W\d_]+")


def suffixes(name: str) -> tuple[str, str]:
    """The suffixes of content and compression, as the file name spells them: `.jsonl`, `.zst`. The
    suffix of an unsupported compression is returned as the content suffix."""
    outer = PurePath(name).suffix
    outer = outer if outer.lower() in COMPRESSED else ""
    return PurePath(name.removesuffix(outer)).suffix, outer


def kind_of(name: str) -> SourceKind | None:
    """The kind of source that reads a file of this name; None if no kind does."""
    return KINDS.get(suffixes(name)[0].lower())


def why_unread(name: str) -> str:
    """The reason why a file of this name cannot be read."""
    suffix, outer = (part.lower() for part in suffixes(name))
    if suffix in _ARCHIVES:
        return f"an archive ({suffix}{outer}): unpack it"
    if not suffix:
        return "the name has no suffix of a format"
    return f"format {suffix} is not supported"


def split_of(name: str) -> Split | None:
    """`train`, `valid` or `test` if a word of the name (without suffixes) says so; if the name has
    several such words, `test` wins over `valid`, and `valid` over `train`."""
    words = {_SPLITS.get(word) for word in _WORD.findall(name.lower())}
    order: tuple[Split, ...] = ("test", "valid", "train")
    return next((split for split in order if split in words), None)


def without_split(name: str) -> str:
    """The name without split words, and without punctuation that then remains at its ends."""
    left = _WORD.sub(lambda word: "" if word[0].lower() in _SPLITS else word[0], name)
    return left if left == name else left.strip("-_. ")
