"""Source kind `tokens`: documents as token ids, from files of other trainers' tools."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from nmoe_core.base.errors import SourceError
from nmoe_core.base.jsonl import encodable
from nmoe_core.sources.file_sources import FileSource
from nmoe_core.sources.forms.columns import Place
from nmoe_core.sources.forms.tokens.cut import Run, Unit, file_beside, not_of_format
from nmoe_core.sources.forms.tokens.mds import INDEX_NAME, mds_runs, mds_unit
from nmoe_core.sources.forms.tokens.megatron import runs as megatron_runs
from nmoe_core.sources.forms.tokens.raw import datatrove_runs, nanogpt_runs, olmo_runs
from nmoe_core.sources.forms.tokens.rows import hf_runs
from nmoe_core.sources.records import START, Block, Position, Reading, Record, Sample
from nmoe_core.sources.storage import SourceFile


class _Format(NamedTuple):
    """How the files of a format are found and read. Files beside a file of tokens have its name
    with another suffix."""

    runs: Callable[[Unit, Reading, Position], Iterator[Run]]
    suffixes: tuple[str, ...]
    """Suffixes of files of tokens."""
    needed: tuple[str, ...] = ()
    """Suffixes of files beside them that must exist."""
    may_be: tuple[str, ...] = ()
    """Suffixes of files beside them that may exist."""

    def unit(self, file: SourceFile) -> Unit:
        """A file and the files beside it. Raises SourceError if its name has another suffix, or a
        needed file is missing (E-SOURCE-FORM)."""
        suffix = next((one for one in self.suffixes if file.name.lower().endswith(one)), None)
        if suffix is None:
            expected = " or ".join(self.suffixes)
            raise not_of_format("not a file of this format", file.where, None, expected)
        if suffix == INDEX_NAME:
            return mds_unit(file)
        stem = file.name.rpartition("/")[2][: -len(suffix)]
        found = {one: file_beside(file, stem + one) for one in (*self.needed, *self.may_be)}
        beside = {one: other for one, other in found.items() if other is not None}
        for one in self.needed:
            if one not in beside:
                raise not_of_format("a file has no index", file.where, None, stem + one)
        return Unit(file, beside)


FORMATS = {
    "megatron": _Format(megatron_runs, (".bin",), (".idx",)),
    "olmo": _Format(olmo_runs, (".npy",), (), (".csv.gz",)),
    "nanogpt": _Format(nanogpt_runs, (".bin",)),
    "mds": _Format(mds_runs, (INDEX_NAME,)),
    "datatrove": _Format(datatrove_runs, (".ds",), (), (".ds.index", ".ds.metadata", ".ds.loss")),
    "hf": _Format(hf_runs, (".parquet", ".arrow")),
}


@dataclass(frozen=True, slots=True)
class TokensBlock(Block):
    """Consecutive documents as tokens."""

    place: Place
    run: Run

    def ids(self) -> list[str]:
        """The id of each document."""
        first = self.start.line
        prefix = encodable(self.place.id_prefix)
        names = [f"{prefix}:{number}" for number in range(first, first + len(self.run.lengths))]
        if self.run.ids is not None:
            names = [encodable(own) or name for own, name in zip(self.run.ids, names)]
        return names

    def tokens(self) -> list[np.ndarray]:
        """The tokens of each document."""
        ends = np.cumsum(self.run.lengths).tolist()
        return [self.run.tokens[start:end] for start, end in pairwise([0, *ends])]

    def records(self) -> Iterator[Record]:
        """Each document, with its tokens."""
        for i, (name, tokens) in enumerate(zip(self.ids(), self.tokens())):
            yield Record(self.start.row + i, name, "", tokens=tokens)

    def keys(self, names: Sequence[str]) -> Iterator[bytes]:
        """What identifies each document: its id, the type of its integers, and its tokens."""
        integers = self.run.tokens.dtype
        payload = np.ascontiguousarray(self.run.tokens).data.cast("B")
        ends = (np.cumsum(self.run.lengths) * integers.itemsize).tolist()
        for name, start, end in zip(names, [0, *ends], ends):
            yield f"{len(name)}:{name}{integers.str}".encode() + payload[start:end]

    def where(self, row: int) -> str:
        return f"{self.place.where}: document {self.start.line + row - self.start.row}"


class TokensSource(FileSource[TokensBlock]):
    """Documents of token files. Raises SourceError if a file does not belong to the format
    (E-SOURCE-FORM), or the token that ends documents is needed and not named (E-SOURCE-EOS)."""

    def __init__(self, reading: Reading, files: Sequence[SourceFile]) -> None:
        form = reading.tokens
        assert form is not None
        self._format = FORMATS[form.format]
        self._is_mds = form.format == "mds"
        self.units = [self._format.unit(file) for file in files]
        own = [(unit.main, *unit.beside.values()) for unit in self.units]
        super().__init__(reading, [file for part in own for file in part])
        is_raw = form.format in ("olmo", "nanogpt")
        if form.eos_token_id is None and (form.joins or is_raw):
            raise SourceError(
                "documents of these files end at a token that is not named",
                where=reading.source,
                do="set eos_token_id of the source",
                code="E-SOURCE-EOS",
            )

    def check(self) -> None:
        """Read the index and the first documents of each file. Raises the errors of `blocks`."""
        for number in range(len(self.units)):
            next(self.unit_blocks(Position(number)), None)

    def size_bytes(self) -> int:
        """Total size of the files of tokens as stored."""
        of_units = [unit.beside.values() if self._is_mds else [unit.main] for unit in self.units]
        return sum(file.size_bytes() for part in of_units for file in part)

    def samples(self) -> Iterator[Sample]:
        """An empty list: tokens have no fields."""
        return iter(())

    def blocks(self, start: Position = START) -> Iterator[TokensBlock]:
        row = start.row
        for number in range(start.file, len(self.units)):
            at = start if number == start.file else Position(number, row=row)
            for block in self.unit_blocks(at):
                row = block.end.row
                yield block

    def unit_blocks(self, start: Position) -> Iterator[TokensBlock]:
        """The blocks of unit `start.file`. Raises the errors of `blocks`."""
        unit = self.units[start.file]
        place = Place(unit.main.where, f"{self.reading.source}/{unit.main.name}")
        at = start
        for run in self._format.runs(unit, self.reading, start):
            count = len(run.lengths)
            end = Position(at.file, run.offset, at.line + count, at.row + count)
            if count:
                yield TokensBlock(self.reading, at, end, run.size_bytes, place, run)
            at = end
