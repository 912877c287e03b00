"""A record past the limit of a source is refused by name before more than the limit is held."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import zstandard

from nmoe_core.base.errors import SourceError
from nmoe_core.base.strict import validate
from nmoe_core.sources.spec import SourceSpec
from tests.core.sources.read import opened, records
from tests.refusals import refused, refused_line

MIB = 2**20
LIMIT_MB = 8
GOOD = b"".join(b'{"text": "a line of some words, number %d"}\n' % i for i in range(50))


def _write(path: Path, size_mb: int) -> None:
    openers: dict[str, Any] = {".gz": gzip.open, ".zst": zstandard.open}
    with openers.get(path.suffix, open)(path, "wb") as file:
        for piece in (GOOD + b'{"text": "', *[b"a" * MIB] * size_mb, b'"}\n' + GOOD):
            file.write(piece)


def _source(path: Path, kind: str = "jsonl", **keys: Any) -> Any:
    return opened(path.parent, kind=kind, paths=[str(path)], **keys).source


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_line_past_the_limit_is_refused_before_more_is_held_and_one_below_it_is_read(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    _write(path, size_mb=200)
    source = _source(path, max_record_mb=LIMIT_MB)
    tracemalloc.start()
    with refused("E-SOURCE-RECORD", naming=[f"{path}:51", "max_record_mb"]):
        records(source)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # One input of zstd may give more than is asked for: 512 bytes, where this line begins.
    assert peak < (LIMIT_MB + (8 if path.suffix != ".zst" else 16)) * MIB
    with pytest.raises(SourceError):
        source.num_rows()
    _write(path, size_mb=LIMIT_MB - 1)
    found = records(source)
    assert len(found) == 101
    assert len(found[50].text) == (LIMIT_MB - 1) * MIB


def test_a_text_file_past_the_limit_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 3 * MIB)
    (tmp_path / "b.txt").write_bytes(b"a")
    keys = {"kind": "files", "max_record_mb": 2}
    with refused("E-SOURCE-RECORD", naming=[str(tmp_path / "a.txt")]):
        list(_source(tmp_path / "*.txt", **keys).blocks())
    assert len(list(_source(tmp_path / "b.txt", **keys).blocks())) == 1


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_cell_past_the_limit_is_refused_by_row(tmp_path: Path, kind: str) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"text": ["a", "b", "c" * 3 * MIB, "d"]})
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(SourceError, match="row 2: a record is longer"):
        records(_source(path, kind=kind, max_record_mb=2))
    assert len(records(_source(path, kind=kind, max_record_mb=4))) == 4


def test_prep_refuses_a_long_line_in_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path / "a.jsonl.zst", size_mb=16)
    command = ["prep", "--source", "jsonl", "--paths", str(tmp_path / "a.jsonl.zst")]
    command += ["--name", "web", "--output", str(tmp_path / "out"), "--num-shards", "1"]
    refused_line(capsys, *command, "--max-record-mb", "4", code="E-SOURCE-RECORD]: ")
    assert not (tmp_path / "out").exists()


def test_the_limit_does_not_make_finished_shards_another_reading(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}))
    table = {"id": "web", "kind": "jsonl", "paths": ["a.jsonl"]}
    tables = (table, table | {"max_record_mb": 5})
    digests = [validate(SourceSpec, t, "test").reading_digest("train") for t in tables]
    assert digests[0] == digests[1]
