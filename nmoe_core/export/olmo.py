"""OLMo-core: `{name}-NNNNN.npy` of raw tokens and `{name}-NNNNN.csv.gz` of documents.

The `.npy` is no NPY file: it is the uint32 tokens alone, as `numpy.memmap` writes them, which is
what OLMo-core and Dolma mean by the name. The table beside it has one row per document: start
and end in tokens, end exclusive, then its id, its file and its number there. Each shard file makes
one file here. Give the `.npy` paths as `paths` of a `NumpyFSLDataset` with `dtype=uint32`.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator
from pathlib import Path

from nmoe_core.base.atomic import atomic_file, write_bytes
from nmoe_core.shards.documents import ShardFile


def write(output: Path, name: str, files: Iterator[ShardFile]) -> Iterator[Path]:
    """Write two files for each file of shards; yields their paths as they are whole."""
    for i, file in enumerate(files):
        data = output / f"{name}-{i:05d}.npy"
        with atomic_file(data) as stream:
            stream.write(file.tokens.data)
        yield data
        table = data.with_suffix(".csv.gz")
        write_bytes(table, gzip.compress(_rows(file), mtime=0))
        yield table


def _rows(file: ShardFile) -> bytes:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for i, ((start, end), (ingest_id, _)) in enumerate(zip(file.spans.tolist(), file.ids())):
        rows.writerow([start, end, ingest_id, file.rel, i])
    return text.getvalue().encode("utf-8", "surrogatepass")
