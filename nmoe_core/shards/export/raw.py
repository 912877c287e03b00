"""Raw tokens: with a table of documents for Megatron-LM and OLMo-core, with a header for llm.c.

Megatron-LM and related trainers (NeMo, Megatron-DeepSpeed, Fast-LLM) read `{name}.bin` and
`{name}.idx`. `.bin` has all tokens as int32 or uint16, with the bytes of the shards. `.idx` is
`MMIDIDX\\0\\0`, then little-endian: uint64 version 1, uint8 type (4 is int32, 8 is uint16), uint64
number of sequences, uint64 number of document bounds, int32 length of each sequence, int64 byte
offset of each, int64 bounds of documents in sequences (`megatron.core.datasets.indexed_dataset`). A
document is one sequence. Pass the path without its suffix as `--data-path`.

OLMo-core reads `{name}-NNNNN.npy` with raw tokens and `{name}-NNNNN.csv.gz` with documents. The
`.npy` is not an NPY file: it has only the tokens, as `numpy.memmap` writes them; OLMo-core and
Dolma use the suffix `.npy` for such files. The table has one row per document: start and end in
tokens (end exclusive), id, file, and number in the file. Each shard file becomes one pair of `.npy`
and `.csv.gz`. Pass the `.npy` paths as `paths` of a `NumpyFSLDataset`, with the `dtype` that
`export.json` names. OLMo-core reads the table line by line, so a line break in an id is written
as `\\n` or `\\r`.

llm.c reads `{name}_NNNNNN.bin`: 256 int32, of which the first three are the magic number, the
version and the number of tokens, then the tokens as uint16 (magic 20240520, version 1) or uint32
(20240801, 7).
"""

import csv
import gzip
import io
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nmoe_core.base.atomic import atomic_file, write_bytes
from nmoe_core.shards.documents import ShardFile

# The code of the integer type, by bytes per token.
_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_TYPES = {4: 4, 2: 8}
# The magic number and the version of llm.c's files, by bytes per token.
_LLMC = {4: (20240801, 7), 2: (20240520, 1)}


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
    counts = struct.pack("<QBQQ", _VERSION, _TYPES[size], len(lengths), len(bounds))
    columns = lengths.astype("<i4"), size * offsets.astype("<i8"), bounds.astype("<i8")
    write_bytes(index, b"".join([_MAGIC, counts, *(column.tobytes() for column in columns)]))
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
        header = np.zeros(256, "<i4")
        header[:3] = *_LLMC[file.tokens.itemsize], len(file.tokens)
        with atomic_file(path) as stream:
            stream.write(header.data)
            stream.write(file.tokens.data)
        yield path
