import json
from pathlib import Path

import pytest

from nmoe_core.cli import main
from tests.project import REPOSITORY, said
from tests.refusals import refused_line

SCRIPTS = REPOSITORY / "scripts"


def test_documents_are_sliced_labelled_watched_and_merged_without_a_run_configuration(
    prepared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slices, labels, data_root = tmp_path / "slices", tmp_path / "labels", str(prepared_data)
    slice_them = ["hydra", "slices", "--data-root", data_root, "--out", str(slices)]
    counts = said(capsys, *slice_them)
    assert sum(counts["all"][split] for split in ("train", "val", "test")) == 150
    assert not said(capsys, *slice_them)["all"]["changed"]
    for split in ("train", "val", "test"):
        for i in range(8):
            facts = said(
                capsys, "hydra", "oracle-label", "--oracle", "heuristic",
                "--input-docids", str(slices / f"{split}_shard_0{i}"),
                "--data-root", data_root, "--out", str(labels / split / f"shard_{i}"),
                f"--set=oracle.relabel={2 if split == 'val' else 0}", "--quiet",
            )  # fmt: skip
            (row,) = facts.values()
            assert row["scorer"] == "heuristic/text-statistics-v3"
    rows = said(capsys, "hydra", "status", "--labels", str(labels), "--slices", str(slices))
    assert [row["state"] for row in rows] == ["DONE"] * 24
    merged = said(capsys, "hydra", "merge-labels", "--labels", str(labels))
    assert merged["train"]["labels"] == counts["all"]["train"]
    assert merged["val"]["labels"] == counts["all"]["val"]
    noise = json.loads((labels / "merged" / "noise_val.json").read_text())
    assert noise["kinds"]["order"]["mae"] == 0.0
    assert main(["hydra", "status", "--labels", str(labels), "--slices", str(slices)]) == 0
    assert "24 shards: 24 DONE, 0 RUNNING, 0 PENDING" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--out"),
        (["--out", "x"], "--checkpoint"),
        (["--out", "x", "--oracle", "http"], "base_url"),
        (["--out", "x", "--oracle", "http", "--set=oracle.http.base_url=http://h/v1"], "model"),
        (["--out", "x", "--oracle", "heuristic"], "--input-docids"),
        (["--out", "x", "--set=oracle.kind=heuristic"], "--input-docids"),
        (["--out", "x", "--oracle", "heuristic", "--input-docids", "s"], "--data-root"),
        (
            ["--out", "x", "--oracle", "heuristic", "--set=oracle.max_doc_tokens=1"],
            "max_doc_tokens",
        ),
    ],
)
def test_a_missing_flag_is_named_before_anything_is_written(
    flags: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert named in refused_line(capsys, "hydra", "oracle-label", *flags, code="E-CONFIG]")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_quiet", [False, True])
def test_quiet_labelling_shows_no_progress(
    is_quiet: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("nmoe_core.base.progress._FIRST_S", 0.0)
    file = tmp_path / "texts.jsonl"
    file.write_text('{"id": "a", "text": "The reef grows."}\n')
    words = ["hydra", "oracle-label", "--oracle", "heuristic", "--input-jsonl", str(file)]
    assert main([*words, "--out", str(tmp_path / "out"), *["--quiet"] * is_quiet]) == 0
    assert ("1 of 1 documents" in capsys.readouterr().err) is not is_quiet
