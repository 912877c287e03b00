"""`verify`, `info`, `inspect` and `regenerate-index` on shards that prep made."""

from pathlib import Path

import numpy as np
import pytest

from nmoe_core.cli import main
from tests.project import json_lines, said
from tests.refusals import refused_line

EOS = 199_999
Output = pytest.CaptureFixture[str]


@pytest.fixture
def split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> Path:
    """A split of two shards, with the working directory above it."""
    rows = [{"id": str(i), "text": f"naïve row {i} " + "of some words " * 5} for i in range(60)]
    (tmp_path / "a.jsonl").write_text(json_lines(rows))
    monkeypatch.chdir(tmp_path)
    command = ["prep", "--source", "jsonl", "--paths", "a.jsonl", "--name", "web"]
    assert main([*command, "--output", "web/train", "--num-shards", "2"]) == 0
    capsys.readouterr()
    return Path("web/train")


def _npy(split: Path) -> Path:
    return split / "shard_0000" / "web-v1-shard-000000.npy"


def _change(path: Path, position: int, token: int) -> None:
    tokens = np.load(path)
    tokens[position] = token
    np.save(path, tokens)


def test_fresh_shards_have_no_issue_with_any_flag(split: Path, capsys: Output) -> None:
    manifest = str(split / "manifest.json")
    for flags in (
        ["--manifest", manifest],
        ["--manifest", manifest, "--all", "--verbose", "--stats", "--sample", "3"],
        ["--manifest", str(split), "--all", "-v"],
        ["--data-dir", str(split), "--eos-token-id", str(EOS)],
        ["--data-dir", str(split), "--eos-token-id", str(EOS), "--num-shards", "3", "--stats"],
    ):
        assert main(["inspect", *flags]) == 0, flags
        assert "no issues" in capsys.readouterr().out
    files = said(capsys, "inspect", "--data-dir", str(split), "--all")["files"]
    assert sum(row["documents"] for row in files) == sum(row["eos"] for row in files) == 60
    for flags, count in ([], 1), (["--num-shards", "2"], 2), (["--all"], 2):
        assert len(said(capsys, "inspect", "--manifest", manifest, *flags)["files"]) == count


def test_a_doubled_eos_and_an_id_outside_the_vocabulary_exit_1_and_are_named(
    split: Path, capsys: Output
) -> None:
    first_eos = int(np.flatnonzero(np.load(_npy(split)) == EOS)[0])
    _change(_npy(split), first_eos + 1, EOS)
    _change(_npy(split), 2, 201_088)
    assert main(["inspect", "--manifest", str(split), "--all", "--verbose"]) == 1
    shown = capsys.readouterr()
    assert f"doubled EOS at token {first_eos + 1}" in shown.out
    assert "id outside the vocabulary at token 2" in shown.out
    errors = shown.err.splitlines()
    assert [line.split(": ", 2)[2].split(" ", 1)[1] for line in errors][::2] == [
        "doubled EOS",
        "token ids outside the vocabulary",
    ]
    assert f"{_npy(split).name}: " in errors[0]


def test_a_file_that_cannot_be_read_is_an_issue_and_the_others_are_seen(
    split: Path, capsys: Output
) -> None:
    _npy(split).write_bytes(_npy(split).read_bytes()[:-2])
    report = said(capsys, "inspect", "--manifest", str(split), "--all", "--sample", "2", status=1)
    assert "E-SHARD-TRUNCATED" in str(report["issues"])
    assert [row["tokens"] > 0 for row in report["files"]] == [False, True]
    assert len(report["samples"]) == 1


def test_a_coverage_below_the_least_is_an_issue(split: Path, capsys: Output) -> None:
    flags = ("inspect", "--manifest", str(split), "--all", "--stats")
    coverage = said(capsys, *flags)["stats"]["vocab_coverage"]
    assert 0 < coverage < 0.01
    said(capsys, *flags, "--min-coverage", str(coverage))
    report = said(capsys, *flags, "--min-coverage", "0.5", status=1)
    assert "is below 0.5" in report["issues"]["vocabulary"][0]


def test_a_sample_is_seeded_and_reads_as_text(split: Path, capsys: Output) -> None:
    flags = ("inspect", "--manifest", str(split), "--sample", "5")
    first = said(capsys, *flags)["samples"]
    assert first == said(capsys, *flags)["samples"]
    assert first != said(capsys, *flags, "--seed", "1")["samples"]
    (rows,) = first.values()
    assert len(rows) == 5
    tokens = np.load(_npy(split))
    for row in rows:
        assert tokens[row["position"]] == row["token"]
        assert row["text"] in row["context"]
    assert any("words" in row["context"] for row in rows)


def test_a_lost_index_is_rebuilt_byte_for_byte_and_a_tail_is_refused(
    split: Path, capsys: Output
) -> None:
    index = _npy(split).with_suffix(".idx")
    before = index.read_bytes()
    index.unlink()
    refused_line(capsys, "verify", str(split), code="E-INDEX-MISSING")
    command = ["regenerate-index", str(_npy(split)), "--eos-token-id", str(EOS)]
    assert main(command) == 0
    assert index.read_bytes() == before
    assert main(["verify", str(split), "--checksums", "--deep"]) == 0
    _change(_npy(split), -1, 5)
    capsys.readouterr()
    refused_line(capsys, *command, code="E-SHARD-TAIL]")
    assert index.read_bytes() == before
    assert main([*command, "--allow-tail"]) == 0


def test_info_shows_the_header_and_two_averages(split: Path, capsys: Output) -> None:
    facts = said(capsys, "info", str(split / "manifest.json"))
    assert facts["total_documents"] == 60
    assert facts["tokens_per_document"] == round(facts["total_tokens"] / 60, 1)
    assert main(["info", str(split)]) == 0
    shown = capsys.readouterr().out
    assert "o200k_harmony" in shown
    assert "201,088" in shown


@pytest.mark.parametrize(
    "argv",
    [
        ["verify", "nowhere.json"],
        ["info", "a.jsonl"],
        ["inspect", "--data-dir", "nowhere"],
        ["regenerate-index", "a.jsonl", "--eos-token-id", "5"],
    ],
)
def test_what_cannot_be_read_is_one_error(split: Path, capsys: Output, argv: list[str]) -> None:
    refused_line(capsys, *argv)


def test_a_directory_above_manifests_is_refused_and_they_are_named(
    split: Path, tmp_path: Path, capsys: Output
) -> None:
    for verb in ("verify", "info"):
        line = refused_line(capsys, verb, str(split.parent), code="E-MANIFEST-MISSING")
        assert f"such as {split / 'manifest.json'}" in line
    (tmp_path / "empty").mkdir()
    line = refused_line(capsys, "verify", str(tmp_path / "empty"), code="E-MANIFEST-MISSING")
    assert "run prep" in line


def test_wrong_usage_exits_2() -> None:
    for argv in (
        ["inspect", "--data-dir", ".", "--num-shards", "0"],
        ["inspect", "--data-dir", ".", "--min-coverage", "2"],
        ["inspect"],
        ["regenerate-index", "a.jsonl"],
    ):
        with pytest.raises(SystemExit, match="2"):
            main(argv)
