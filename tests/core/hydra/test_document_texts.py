"""Documents of JSON lines, labelled without shards."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from nmoe_core.errors import FormatError
from nmoe_core.hydra.document_texts import JsonlDocuments
from nmoe_core.hydra.label_files import read_records
from nmoe_core.hydra.labels import label_shard
from nmoe_core.hydra.rubric import Rubric
from nmoe_core.prep.tokenizer import load_tokenizer


def test_json_lines_are_labelled_without_shards(
    tmp_path: Path, world: SimpleNamespace, rubric: Rubric
) -> None:
    path = tmp_path / "web.jsonl"
    rows = [
        {"doc_id": "a", "source": "s", "text": "w1 w2"},
        {"id": 7, "text": "w3 " * 40},
        {"text": "w5\ud83d"},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    documents = JsonlDocuments(path, load_tokenizer(), 16)
    assert documents.rows == [("a", "s"), ("7", "web"), ("web.jsonl:3", "web")]
    label_shard(documents, tmp_path / "out", world.FakeOracle(fails_on=bool), rubric)
    records = read_records(tmp_path / "out" / "scores.jsonl")
    assert [record["truncated"] for record in records] == [False, True, False]
    assert "w3" in records[1]["snippet"]
    assert records[2]["snippet"] == "w5?"


@pytest.mark.parametrize(
    "line", ["{}", "[1]", '{"text": 5}', "nonsense", '{"id": "a", "text": ""}']
)
def test_a_json_line_without_text_or_with_a_known_id_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "a", "text": "t"}\n' + line + "\n")
    with pytest.raises(FormatError) as refused:
        JsonlDocuments(path, load_tokenizer(), 16)
    assert refused.value.code == "E-DOCID"
