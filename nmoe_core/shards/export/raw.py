"""Raw tokens: with a table of documents for Megatron-LM and OLMo-core, with a header for llm.c.

`nmoe_core.sources.forms.tokens` has the formats. For Megatron, a document is one sequence; pass the
path without its suffix as `--data-path`. For OLMo-core, each shard file becomes one pair of `.npy`
and `.csv.gz`; pass the `.npy` paths as `paths` of a `NumpyFSLDataset`, with the `dtype` that
`export.json` names. A line break in an id is written as `\\n` or `\\r`.
"""

import csv
import gzip
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nmoe_core.base.atomic import atomic_file, write_bytes
from nmoe_core.shards.documents import ShardFile
from nmoe_core.sources.forms.tokens import megatron
from nmoe_core.sources.forms.tokens.raw import LLMC, LLMC_INTEGERS

# The code of Megatron's type of tokens, by bytes per token.
_CODES = {4: 4, 2: 8}


def write_megatron(output: Path, name: str, files: Iterator[ShardFile]) -> Iterator[Path]:
    """Write both files; yields the path of each when it is complete."""
    data = output / f"{name}.bin"
    index = output / f"{name}.idx"
    found = [np.empty(0, np.int64)]
    size = 4
    with atomic_file(data) as stream:
        for file in files:
            stream.write(file.tokens.data)
            found.append(file.lengths())
            size = file.tokens.itemsize
    yield data
    lengths = np.concatenate(found)
    offsets = np.cumsum(lengths) - lengths
    bounds = np.arange(len(lengths) + 1)
    head = megatron.HEADER.pack(
        megatron.MAGIC, megatron.VERSION, _CODES[size], len(lengths), len(bounds)
    )
    columns = lengths.astype("<i4"), size * offsets.astype("<i8"), bounds.astype("<i8")
    write_bytes(index, b"".join([head, *(column.tobytes() for column in columns)]))
    yield index


def write_olmo(output: Path, prefix: str, files: Iterator[ShardFile]) -> Iterator[Path]:
    """Write two files per shard file; yields the path of each when it is complete."""
    for number, file in enumerate(files):
        data = output / f"{prefix}-{number:05d}.npy"
        with atomic_file(data) as stream:
            stream.write(file.tokens.data)
        yield data
        text = io.StringIO()
        table = data.with_suffix(".csv.gz")
        rows = csv.writer(text, lineterminator="\n")
        for i, ((start, end), (ingest_id, _)) in enumerate(zip(file.spans.tolist(), file.ids())):
            name = ingest_id.replace("\n", "\\n").replace("\r", "\\r")
            rows.writerow([start, end, name, file.rel, i])
        payload = text.getvalue().encode("utf-8", "surrogatepass")
        write_bytes(table, gzip.compress(payload, mtime=0))
        yield table


def write_llmc(output: Path, name: str, files: Iterator[ShardFile]) -> Iterator[Path]:
    """Write one file per shard file; yields the path of each when it is complete."""
    for number, file in enumerate(files):
        path = output / f"{name}_{number:06d}.bin"
        header = np.zeros(LLMC_INTEGERS, "<i4")
        header[:3] = *LLMC[file.tokens.itemsize], len(file.tokens)
        with atomic_file(path) as stream:
            stream.write(header.data)
            stream.write(file.tokens.data)
        yield path
