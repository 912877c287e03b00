"""Records that a source leaves out by rule are counted by reason, and the counts add up."""

import json
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.cli import main
from tests.core.sources.archives import archive, page, response

NOT_HTML = [("Content-Type", "image/png")]


def _crawl(first: int, count: int) -> bytes:
    """An archive in which every third response is an image."""
    numbers = range(first, first + count)
    return archive(
        [
            response(
                f"http://a.example/{i}", page(i), **({"headers": NOT_HTML} if i % 3 == 0 else {})
            )
            for i in numbers
        ]
    )


def _prep(
    capsys: pytest.CaptureFixture[str], paths: str, *flags: str, kind: str = "warc"
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The facts of the command, the facts that a shard's manifest has of the source, and what
    was said."""
    capsys.readouterr()
    command = ["prep", "--source", kind, "--paths", paths, "--name", "web", "--output", "train"]
    assert main([*command, "--num-shards", "1", "--json", *flags]) == 0
    said = capsys.readouterr()
    info = json.loads(Path("train/shard_0000/manifest.json").read_bytes())["source_info"]
    [facts] = json.loads(said.out)
    return facts, info, said.err


def _adds_up(info: dict[str, Any], documents: int) -> bool:
    left_out = ("bad_records", "empty_documents", "filtered_documents")
    skipped = sum(info.get("skipped_records", {}).values())
    return info["records_read"] == documents + skipped + sum(info[name] for name in left_out)


def test_left_out_records_are_counted_by_reason_and_are_no_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nmoe_core.sources.web.warc.BLOCK_BYTES", 4000)
    Path("a-0.warc").write_bytes(_crawl(0, 30))
    facts, info, said = _prep(capsys, "a-*.warc")
    assert info["skipped_records"] == {"responses that are not HTML": 10, "warcinfo records": 1}
    assert (info["bad_records"], info["records_read"], facts["documents"]) == (0, 31, 20)
    assert "web/train: left out: 10 responses that are not HTML" in said
    # A split that grows counts them all again, also in blocks whose documents it has.
    Path("a-1.warc").write_bytes(_crawl(30, 30))
    facts, info, said = _prep(capsys, "a-*.warc")
    assert info["skipped_records"] == {"responses that are not HTML": 20, "warcinfo records": 2}
    assert (facts["documents"], facts["documents_reused"]) == (40, 20)
    assert _adds_up(info, 40)
    grown = Path("train/shard_0000/manifest.json").read_bytes()
    fresh = _prep(capsys, "a-*.warc", "--force", "--set", "prep.reuse=false")[1]
    assert fresh == info
    assert (
        json.loads(grown)["content_hash"]
        == json.loads(Path("train/shard_0000/manifest.json").read_bytes())["content_hash"]
    )


def test_a_budget_counts_the_records_up_to_the_document_that_uses_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.warc").write_bytes(_crawl(0, 30))
    facts, info, _ = _prep(capsys, "a.warc", "--max-tokens", "500")
    assert 0 < facts["documents"] < 20
    assert _adds_up(info, facts["documents"])


def test_detected_encodings_are_counted_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "Das große Café über den Flüssen ist früh geöffnet, und größere Hügel liegen im Süden. "
    for number, encoding in enumerate(["cp1252", "utf-8", "cp1252"]):
        line = json.dumps({"text": f"{number} {text * 3}"}, ensure_ascii=False) + "\n"
        Path(f"{number}.jsonl").write_bytes((line * 20).encode(encoding))
        Path(f"{number}.txt").write_bytes((text * 9).encode(encoding))
    for kind, paths in (("jsonl", "*.jsonl"), ("files", "*.txt")):
        _, info, said = _prep(capsys, paths, "--encoding", "detect", "--force", kind=kind)
        assert info["file_encodings"] == {"cp1252": 2, "utf-8": 1}
        assert "web/train: 2 files in the encoding cp1252" in said
        # without detection, nothing is counted
        flags = ("--on-error", "skip", "--force")
        assert "file_encodings" not in _prep(capsys, paths, *flags, kind=kind)[1]
