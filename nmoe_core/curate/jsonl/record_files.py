"""The files of `nmoe curate`: reads the records of the input and names the path of every output.

One pass over the input reads, parses and hashes it; memory is 48 bytes per record, not the text.
Blank lines are counted but are not records. If a line is not a JSON object with a text, an error
names its number before any file is written; with `--on-error set-aside`, such lines are written to
a separate file. A record may have an empty text. Lines are copied byte for byte, without their line
end. `.gz` and `.zst` files are decompressed to a temporary file on disk.
"""

import glob
import hashlib
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Literal

import numpy as np

from nmoe_core.base.atomic import TMP_MARK, atomic_file, output_lock, save_array
from nmoe_core.base.errors import CurationError
from nmoe_core.base.interrupts import is_running
from nmoe_core.base.jsonl import lines_of, parse_object, text_of
from nmoe_core.sources.storage import COMPRESSED, open_plain

OnError = Literal["fail", "set-aside"]
_NAMED_LINES = 5
PICTURES = {
    "order": "ordering_comparison.png",
    "shares": "cluster_shares.png",
    "head and tail": "head_tail.png",
    "cloud": "cluster_cloud.png",
    "k": "k_calibration.png",
}


@dataclass(frozen=True, slots=True)
class JsonlPaths:
    """Paths that the curation of one file reads and writes."""

    input: Path
    output: Path  # the reordered file; most other outputs are named after it
    model: Path  # checkpoint with the embedding table and the tokenizer
    embeddings: Path | None = None  # a `.npy` file that replaces shallow embeddings
    counts: Path | None = None  # where to write token counts; default: see `token_counts`

    def beside(self, ending: str) -> Path:
        """`{output without .jsonl}{ending}`."""
        return self.output.with_name(self.output.name.removesuffix(".jsonl") + ending)

    def picture(self, what: str) -> Path:
        """Path of a picture of `PICTURES`."""
        return self.output.with_name(PICTURES[what])

    @property
    def token_counts(self) -> Path:
        """`{input without .jsonl}_token_counts.npy`, unless `counts` names another file."""
        name = self.input.stem if self.input.suffix in COMPRESSED else self.input.name
        stem = name.removesuffix(".jsonl")
        return self.counts or self.input.with_name(f"{stem}_token_counts.npy")

    def require_counts(self) -> None:
        """Check that the token counts can be written. Raises CurationError (E-CURATION-INPUT)."""
        try:
            with TemporaryFile(dir=self.token_counts.parent):
                return
        except OSError as error:
            raise CurationError(
                "token counts cannot be written beside the input",
                where=self.token_counts.parent,
                found=error.strerror,
                expected="a writable directory",
                do="name another file with --token-counts",
                code="E-CURATION-INPUT",
            ) from None

    @property
    def cache(self) -> Path:
        """Directory of the embedding caches and of the output's lock."""
        return self.beside("_cache")

    def check(self) -> None:
        """Check that the output is not the input and is not named like a compressed file. Raises
        CurationError (E-CURATION-INPUT)."""
        if self.output.suffix in COMPRESSED:
            raise CurationError(
                "the output cannot be compressed",
                where=self.output,
                do=f"remove {self.output.suffix} from --output",
                code="E-CURATION-INPUT",
            )
        if self.output.resolve() == self.input.resolve():
            raise CurationError(
                "the output is the input",
                where=self.output,
                do="name another --output: curation does not change the input",
                code="E-CURATION-INPUT",
            )


@contextmanager
def lock_outputs(paths: JsonlPaths) -> Iterator[None]:
    """Lock the output for this process and remove leftovers of a killed writer. Raises LockedError
    if another process is curating the same output (E-LOCKED)."""
    with output_lock(paths.cache):
        written = [paths.token_counts, *map(paths.picture, PICTURES)]
        patterns = [(path.parent, glob.escape(path.name)) for path in written]
        stem = paths.beside("")
        for directory, pattern in [(stem.parent, glob.escape(stem.name) + "*"), *patterns]:
            for left in directory.glob(f"{pattern}{TMP_MARK}*"):
                # Temporary files of pictures and token counts may belong to a running process that
                # writes another output.
                if not is_running(left.name.rpartition(".")[2]):
                    left.unlink(missing_ok=True)
        yield


def write_array(path: Path, array: np.ndarray) -> None:
    """Write one array as `.npy`, atomically."""
    with atomic_file(path) as file:
        save_array(file, array)


@dataclass(slots=True)
class JsonlInput:
    """The records of a scanned file."""

    path: Path
    text_field: str
    sha256: str = ""  # SHA-256 of the decompressed bytes
    pages: mmap.mmap | None = None  # the mapped bytes; None without records
    # Byte range of each record, end exclusive: int64 [N, 2].
    spans: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64))
    keys: np.ndarray = field(default_factory=lambda: np.empty(0, "S32"))  # SHA-256 of each text
    num_blank: int = 0  # lines that hold only white space
    num_empty: int = 0  # records whose text is empty
    rejected: list[tuple[int, int]] = field(default_factory=list)  # spans of bad lines

    def __len__(self) -> int:
        return len(self.spans)

    def texts(self, records: np.ndarray) -> Iterator[str]:
        """Yield the texts of records, in the given order; lone surrogates become U+FFFD."""
        for line in self.lines(self.spans[records]):
            text = _text(line, self.text_field)
            yield text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")

    def lines(self, spans: np.ndarray | list[tuple[int, int]]) -> Iterator[bytes]:
        """Yield the bytes of spans, without line ends."""
        assert self.pages is not None
        for start, end in np.asarray(spans, np.int64).reshape(-1, 2).tolist():
            yield self.pages[start:end]


def scan_jsonl(path: Path, text_field: str = "text", on_error: OnError = "fail") -> JsonlInput:
    """Find the records of a file.

    Args:
        path: JSONL, UTF-8, plain, `.gz` or `.zst`; the last line may lack its line end.
        text_field: JSON key of the text.
        on_error: `fail` refuses a file with bad lines and names the first ones; `set-aside` lists
            all of them in `rejected`.

    Raises:
        CurationError: The file is missing or has no records (E-CURATION-INPUT); a line is not a
            record and `on_error` is `fail`, or a line is too long (E-CURATION-LINE).
        SourceError: A compressed file is damaged (E-SOURCE-TORN).
    """
    if not path.is_file():
        raise _refuse("cannot be read", path, "no file", "correct --input")
    with open_plain(path) as file:
        found = _scan(file, path, text_field, on_error)
        found.pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return found


def _scan(file: IO[bytes], path: Path, text_field: str, on_error: OnError) -> JsonlInput:
    found = JsonlInput(path, text_field)
    digest = hashlib.sha256()
    spans: list[tuple[int, int]] = []
    keys: list[bytes] = []
    bad: list[tuple[int, str]] = []
    for number, start, payload in lines_of(file, lambda *line: _bad_lines(path, [line]), digest):
        line = payload.removesuffix(b"\n")
        span = (start, start + len(line))
        if not line.strip():
            found.num_blank += 1
            continue
        try:
            text = _text(line, text_field)
        except ValueError as error:
            bad.append((number, str(error)))
            found.rejected.append(span)
            continue
        spans.append(span)
        keys.append(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
        found.num_empty += not text
    if bad and on_error == "fail":
        raise _bad_lines(path, bad)
    if not spans:
        blank = f"{found.num_blank} blank lines"
        raise _refuse("has no records", path, blank, "correct --input")
    found.spans = np.array(spans, np.int64)
    found.keys = np.array(keys, "S32")
    found.sha256 = digest.hexdigest()
    return found


def write_records(path: Path, records: JsonlInput, order: np.ndarray) -> None:
    """Write the records in the given order, byte for byte, each with one line end. Raises
    CurationError if the order is not a permutation (E-CURATION-ORDER), or if the input changed
    since it was scanned (E-CURATION-INPUT)."""
    if not np.array_equal(np.sort(order), np.arange(len(records))):
        raise CurationError("order is not a permutation of the records", code="E-CURATION-ORDER")
    with atomic_file(path) as file:
        for line in records.lines(records.spans[order]):
            file.write(line + b"\n")
        if hashlib.sha256(records.pages or b"").hexdigest() != records.sha256:
            raise CurationError(
                "input changed while it was curated",
                where=records.path,
                do="run again",
                code="E-CURATION-INPUT",
            )


def write_set_aside(path: Path, records: JsonlInput) -> None:
    """Write the lines that are not records, byte for byte; writes no file if there are none."""
    path.unlink(missing_ok=True)
    if records.rejected:
        with atomic_file(path) as file:
            for line in records.lines(records.rejected):
                file.write(line + b"\n")


def _text(line: bytes, text_field: str) -> str:
    """The text of a line. Raises ValueError, with the fault, if the line is not a record."""
    record = parse_object(line)
    if record.get(text_field, "") is None:
        raise ValueError(f"field {text_field!r} is null, not text")
    return text_of(record, text_field)


def _bad_lines(path: Path, bad: list[tuple[int, str]]) -> CurationError:
    more = f"; and {len(bad) - _NAMED_LINES} more" * (len(bad) > _NAMED_LINES)
    return CurationError(
        f"{len(bad)} lines are not records",
        where=path,
        found="; ".join(f"line {number}: {why}" for number, why in bad[:_NAMED_LINES]) + more,
        expected="one JSON object with a text per line",
        do="correct these lines, set --text-field, or pass --on-error set-aside",
        code="E-CURATION-LINE",
    )


def _refuse(what: str, path: Path, found: str, do: str) -> CurationError:
    return CurationError(f"input {what}", where=path, found=found, do=do, code="E-CURATION-INPUT")
