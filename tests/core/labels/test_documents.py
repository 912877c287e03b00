"""Documents of JSON lines, labelled without shards."""

import json
import re
from pathlib import Path

import pytest

from nmoe_core.base.errors import NmoeError
from nmoe_core.labels.documents import JsonlTexts, jsonl_documents
from nmoe_core.labels.label import label_shard
from nmoe_core.labels.oracle import read_records
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.records import Reading, Record
from nmoe_core.text.normalise import normalize_text
from nmoe_core.text.tokenizer import load_tokenizer
from tests.core.small_gradings import FakeOracle
from tests.refusals import refused

BAD_LINES = {
    "{}": "field 'text' is missing",
    "[1]": "not a JSON object but list",
    '{"text": 5}': "field 'text' is int, not text",
    "nonsense": "not JSON",
    "[" * 100_000: "not JSON",
    '{"text": "\\ud83d", "id": 1.5}': "not text or a whole number",
    '{"text": "t", "source": 3}': "field 'source' is int",
    '{"id": "a", "text": ""}': "occurs twice",
    '{"text": "' + "x" * 200_000 + '"}': "more than 150000 bytes",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=list(BAD_LINES.values()))
def test_a_line_that_is_no_document_is_refused_by_its_number(
    tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.base.jsonl.MAX_LINE_BYTES", 150_000)
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "a", "text": "t"}\n\n' + line + "\n")
    with pytest.raises(NmoeError, match=rf"in\.jsonl:3: .*{re.escape(BAD_LINES[line])}") as refused:
        JsonlTexts(path)
    assert refused.value.code == ("E-DOCID" if "twice" in str(refused.value) else "E-SOURCE-RECORD")


def test_files_that_are_missing_or_packed_or_lack_ids_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "a", "text": "t"}\n')
    (tmp_path / "in.jsonl.gz").write_bytes(b"")
    for name in ("no.jsonl", "in.jsonl.gz"):
        with refused("E-SOURCE-NOTFOUND", match="plain JSON lines"):
            JsonlTexts(tmp_path / name)
    with refused("E-SOURCE-RECORD", match=r"doc_id.*missing"):
        JsonlTexts(tmp_path / "in.jsonl", id_field="doc_id")


def test_json_lines_are_labelled_under_the_ids_that_prep_gives(tmp_path: Path) -> None:
    path, out = tmp_path / "web.jsonl", tmp_path / "out"
    texts = [" a\r\nb ", None, "w3 " * 40, "w5\ud83d"]
    keys = [{}, {"id": 7}, {"id": ""}, {"doc_id": "a", "source": "s"}]
    lines = [json.dumps(key | {"text": text}) for key, text in zip(keys, texts)]
    path.write_text("\ufeff" + lines[0] + "\n\n" + "\n".join(lines[1:]))
    blocks = JsonlSource(Reading("web"), find_files([str(path)], tmp_path)).blocks()
    prepared = [r for block in blocks for r in block.records() if isinstance(r, Record)]
    documents = jsonl_documents(JsonlTexts(path), load_tokenizer(), 16)
    assert [doc_id for doc_id, _ in documents.rows[:3]] == [r.id for r in prepared[:3]]
    # The ids of a file that is labelled may stand under `doc_id`, and each line may name a source.
    assert documents.rows[3] == ("a", "s")
    assert {source for _, source in documents.rows[:3]} == {"web"}
    label_shard(documents, out, FakeOracle(fails_on=lambda text: True))
    records = list(read_records(out / "scores.jsonl"))
    assert [record["truncated"] for record in records] == [False, False, True, False]
    shown = [normalize_text(r.text).replace("\n", " ") for r in prepared]
    assert all(text.startswith(record["snippet"]) for text, record in zip(shown, records))
    assert records[0]["snippet"] == shown[0]
    assert records[3]["snippet"] == "w5\ufffd"
