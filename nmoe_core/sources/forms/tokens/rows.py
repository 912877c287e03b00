"""Parquet and Arrow files with a column of lists of token ids, such as `datasets` writes.

Other columns, also `attention_mask` and `labels`, are not read.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from nmoe_core.sources.file_sources import FileSource
from nmoe_core.sources.forms.arrow import ArrowSource, ParquetSource
from nmoe_core.sources.forms.columns import ColumnsBlock
from nmoe_core.sources.forms.tokens.cut import Run, Unit, delimited_runs, not_of_format, resumed
from nmoe_core.sources.records import START, Position, Reading


def hf_runs(unit: Unit, reading: Reading, start: Position) -> Iterator[Run]:
    """The rows of a file as documents; or the documents that EOS ends, also across rows. Raises
    SourceError if it has no such column (E-SOURCE-FIELD), or a list has a null (E-SOURCE-FORM)."""
    is_parquet = unit.main.name.lower().endswith(".parquet")
    source: FileSource[ColumnsBlock] = (ParquetSource if is_parquet else ArrowSource)(
        reading, [unit.main]
    )
    assert reading.tokens is not None
    if reading.tokens.joins:
        runs = (_run(block, unit) for block in source.blocks(START))
        chunks = (run.tokens for run in runs)
        return resumed(delimited_runs(reading, unit.main.where, chunks, 0), start.line)
    return (_run(block, unit) for block in source.blocks(Position(0, start.offset, start.line)))


def _run(block: ColumnsBlock, unit: Unit) -> Run:
    import pyarrow.compute as pc

    rows: Any = block.columns.column(0)
    lengths: Any = pc.call_function("list_value_length", [rows]).fill_null(0)
    values = rows.flatten()
    if values.null_count:
        what = "a list of tokens has a null"
        raise not_of_format(what, block.where(block.start.row), "null", "integers")
    ids = None
    if block.reading.id_field:
        ids = [
            one.decode("utf-8", "replace") if isinstance(one, bytes) else str(one)
            for one in block.columns.column(1).to_pylist()
        ]
    tokens = values.to_numpy(zero_copy_only=False)
    counts = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    return Run(tokens, counts, ids, block.end.offset, block.size_bytes)
