"""Records that cannot be read: what fails the run, what is left out, and what is counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loader.files.format import load_manifest
from nmoe_core.base.errors import SourceError
from nmoe_core.prep.run import PrepReport, PrepSettings, prep_shards, write_manifest
from nmoe_core.sources.files import FilesSource
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.records import OnError, Reading, Split
from tests.refusals import refused

GOOD = json.dumps({"text": "ten words of plain text make a document of ten tokens"}).encode()
BAD_UTF8 = GOOD.replace(b"plain", b"pl\xffin")
TORN = GOOD[:30]
NO_TEXT = b'{"body": "x"}'
SETTINGS = PrepSettings(name="web", num_shards=2)


def _prep(
    directory: Path, lines: list[bytes], on_error: OnError = "fail", **changes: float
) -> PrepReport:
    directory.mkdir(exist_ok=True)
    (directory / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    source = JsonlSource(Reading("web", on_error=on_error), find_files(["a.jsonl"], directory))
    out = directory / "train"
    settings = replace(SETTINGS, on_error=on_error, **changes)
    report = prep_shards(Split(source), settings, out)
    write_manifest(settings, out)
    return report


def _info(directory: Path) -> dict[str, int]:
    return load_manifest(directory / "train" / "shard_0000" / "manifest.json").extra["source_info"]


def test_bad_records_are_counted_up_to_the_largest_share_and_fail_past_it_with_their_lines(
    tmp_path: Path,
) -> None:
    report = _prep(tmp_path, [*[GOOD] * 999, TORN])
    assert (report.num_documents, report.outcomes["bad"]) == (999, 1)
    assert "a.jsonl:1000: not JSON" in report.bad_examples[0]
    assert _info(tmp_path)["bad_records"] == 1
    says = ["2 of 1000 records cannot be read", "a.jsonl:1: field 'text' is missing"]
    says += ["a.jsonl:1000: not JSON", "at most 0.100 %"]
    with refused("E-SOURCE-RECORD", naming=says):
        _prep(tmp_path, [NO_TEXT, *[GOOD] * 998, TORN])
    tenth = _prep(tmp_path / "tenth", [*[GOOD] * 9, TORN], max_bad_share=0.1)
    assert tenth.num_documents == 9
    with pytest.raises(SourceError, match="1 of 1000 records"):
        _prep(tmp_path / "none", [*[GOOD] * 999, TORN], max_bad_share=0.0)


def test_many_bad_records_end_the_run_long_before_the_end_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", 65536)
    with pytest.raises(SourceError, match="of 10") as caught:
        _prep(tmp_path, [*[GOOD] * 9, TORN] * 5000)
    assert "of 50000" not in str(caught.value)


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_other_policies_leave_out_what_cannot_be_read_and_count_it(
    tmp_path: Path, on_error: OnError
) -> None:
    escaped = GOOD.replace(b"plain", b"pl\\ud800in")  # JSON, so nothing of it is replaced
    report = _prep(tmp_path, [GOOD, TORN, NO_TEXT, BAD_UTF8, escaped], on_error)
    num_replaced = int(on_error == "replace")
    assert report.num_documents == 2 + num_replaced
    info = _info(tmp_path)
    assert info["bad_records"] == 3 - num_replaced
    assert info["replaced_records"] == report.num_replaced == num_replaced


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.md").write_text("ten words of plain text make one document here, yes")
    (tmp_path / "tree" / "b.md").write_bytes(b"\xff\xfe")
    files = find_files(["tree/*.md"], tmp_path)
    with pytest.raises(SourceError, match=r"b\.md: not UTF-8 at byte 0"):
        prep_shards(Split(FilesSource(Reading("docs"), files)), SETTINGS, tmp_path / "train")
    replaced = replace(SETTINGS, on_error="replace", min_doc_tokens=1)
    source = FilesSource(Reading("docs", on_error="replace"), files)
    report = prep_shards(Split(source), replaced, tmp_path / "train")
    assert (report.num_documents, report.num_replaced) == (2, 1)
