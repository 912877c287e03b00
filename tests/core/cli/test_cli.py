"""The command line: exit codes, one line per error, nothing written when refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nmoe_core.cli import main
from tests.project import Source, jsonl_source, write_project
from tests.refusals import refused_line


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [{"id": str(i), "text": f"row {i} " + "some words " * 20} for i in range(60)]
    web = jsonl_source("web", rows, tokens_b=0.0000006, valid_split="train[:10%]")
    notes = {"id": "notes", "tokens_b": 0.0000004, "kind": "files", "paths": ["in/*.md"]}
    write_project(tmp_path, [web, Source(notes, {"in/b.md": "a note " * 50})])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_mixture_is_prepared_verified_shown_and_inspected(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prep-mixture", "--config", "run.toml", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [(r["source"], r["split"], r["documents"]) for r in results] == [
        ("web", "train", 54),
        ("web", "valid", 6),
        ("notes", "train", 1),
    ]
    for result in results:
        assert main(["verify", result["manifest"], "--checksums", "--deep"]) == 0
        assert main(["inspect", "--manifest", result["manifest"], "--all", "--stats"]) == 0
    capsys.readouterr()
    assert main(["info", results[0]["manifest"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total_tokens"] == results[0]["tokens"]


def test_a_flipped_byte_makes_verify_exit_1_and_name_the_file(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["prep-mixture", "--config", "run.toml"])
    npy = next((project / "out/data/web/train").rglob("*.npy"))
    payload = bytearray(npy.read_bytes())
    payload[-1] ^= 1
    npy.write_bytes(payload)
    command = ("verify", "out/data/web/train/manifest.json", "--checksums")
    assert npy.name in refused_line(capsys, *command, code="E-SHARD-CHECKSUM]: ")


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (("run.toml", "num_shards", "num_shard"), "E-CONFIG-KEY", "did you mean 'num_shards'"),
        (("run.toml", '"all"', '"lots"'), "E-CONFIG", "lots"),
        (("run.toml", "mixture.toml", "mixtures.toml"), "E-CONFIG", "mixtures.toml"),
        (("run.toml", '"small"', '"smal"'), "E-CONFIG", "smal"),
        (("mixture.toml", "in/*.md", "in/*.rst"), "E-SOURCE-NOTFOUND", "in/*.rst"),
        (("mixture.toml", "paths", "path"), "E-CONFIG-KEY", "did you mean 'paths'"),
        (("mixture.toml", "in/web.jsonl", "in/*.md"), "E-SOURCE-RECORD", "b.md:1"),
        (("in/web.jsonl", '"text"', '"body"'), "E-SOURCE-RECORD]", "in/web.jsonl:"),
    ],
)
def test_a_wrong_setting_or_field_is_one_line_and_nothing_is_written(
    project: Path,
    capsys: pytest.CaptureFixture[str],
    change: tuple[str, str, str],
    code: str,
    says: str,
) -> None:
    file, old, new = change
    path = project / file
    count = -1 if file.startswith("in") else 1
    path.write_text(path.read_text().replace(old, new, count))
    assert says in refused_line(capsys, "prep-mixture", "--config", "run.toml", code=code)
    assert not (project / "out").exists()


def test_changed_input_is_refused_until_forced(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["prep", "--source", "files", "--paths", "in/*.md", "--name", "n"]
    command += ["--output", "out/n/train", "--num-shards", "1"]
    assert main(command) == 0
    (project / "in" / "b.md").write_text("another note " * 50)
    refused_line(capsys, *command, code="E-PREP-CHANGED]")
    assert main([*command, "--force"]) == 0
    assert main(["verify", "out/n/train/manifest.json", "--checksums"]) == 0


def test_help_and_prep_import_neither_torch_nor_dagster() -> None:
    code = """
import sys
from nmoe_core.cli import main
from tests.project import Source, jsonl_source, write_project
try:
    main(["--help"])
except SystemExit:
    pass
import nmoe_core.prep.run, nmoe_core.prep.mixture
heavy = {"torch", "dagster", "sklearn", "datasets", "matplotlib", "pandas"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "prep-mixture" in done.stdout


def test_quality_tasks_refuse_before_their_inputs_exist(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["hydra", "slices"], ["hydra", "merge-labels"], ["report"]):
        refused_line(capsys, *command, "--config", "run.toml")
    assert not (project / "out").exists()


def test_a_row_without_a_step_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("explain", "some-id", "--row", "1", "--config", "run.toml")
    assert "--row without --step" in refused_line(capsys, *command)
