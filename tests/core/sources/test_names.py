"""Two sources of one name: refused before anything is written, or given two names."""

import json
from pathlib import Path

import pytest

from loader import resolve_plan
from nmoe_core.cli import main
from tests.project import TOKENS_B, json_lines, jsonl_source, said, write_project
from tests.refusals import refused, refused_line

TEXT = "of one source, and of many more documents beside it; " * 4
ROWS = [{"id": f"d{i}", "text": f"document {i} {TEXT}"} for i in range(20)]


def test_two_sources_of_one_name_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = [jsonl_source("web", ROWS[:10]), jsonl_source("web", ROWS[10:])]
    project = write_project(tmp_path, twice)
    for verb in ("prep-mixture", "hydra slices", "plan"):
        line = refused_line(capsys, *verb.split(), "--config", str(project.config))
        assert "'web'" in line
    assert not (tmp_path / "out").exists()


def test_one_name_for_two_inputs_in_two_stages_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = write_project(tmp_path, [jsonl_source("web", ROWS)])
    mixture = project.directory / "mixture.toml"
    other = f'[mixtures.late]\ntotal_tokens_b = {TOKENS_B}\n[[mixtures.late.sources]]\nid = "web"\n'
    other += f'kind = "jsonl"\npaths = ["in/other.jsonl"]\ntokens_b = {TOKENS_B}\n'
    mixture.write_text(mixture.read_text() + other)
    flows = project.directory / "flows.toml"
    text = flows.read_text().replace('["pretrain"]', '["pretrain", "mid"]')
    flows.write_text(text.replace('pretrain = "mix"', 'pretrain = "mix"\nmid = "late"'))
    line = refused_line(capsys, "prep-mixture", "--config", str(project.config))
    assert "two mixtures define the same source differently" in line
    assert not (tmp_path / "out").exists()


@pytest.fixture
def split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A prepared split."""
    project = write_project(tmp_path, [jsonl_source("web", ROWS)])
    said(capsys, "prep-mixture", "--config", project.config)
    return tmp_path / "out" / "data" / "web" / "train"


def test_a_plan_takes_no_name_twice_from_a_table_or_a_command(
    tmp_path: Path, split: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"path": str(split), "name": "web", "weight": 1}
    table = {"datasets": [row], "batch_size": 1, "seq_len": 16}
    with refused("E-CONFIG", "a name appears twice", naming=["'web'"]):
        resolve_plan(table | {"datasets": [row, row]})
    path, output = tmp_path / "plan.json", tmp_path / "next.json"
    path.write_text(resolve_plan(table).placed_in(tmp_path).to_json())
    sources = [f"{flag}={name}={split}" for flag, name in (("--source", "web"), ("--add", "code"))]
    ends, other = ["-o", str(output)], tmp_path / "other"
    prep = ["prep", "--source", "jsonl", "--name", "web", "--paths", tmp_path / "in" / "web.jsonl"]
    said(capsys, *prep, "--output", other, "--max-tokens", "300", "--num-shards", "1")
    for words in (
        ["twin", str(path), *sources[:1] * 2, "--seq-len", "64", *ends],
        ["remix", str(path), "--step", "1", "--weights", "web=1,code=1", *sources[1:] * 2, *ends],
        ["remix", str(path), "--step", "1", "--weights", "web=1", f"--add=web={other}", *ends],
    ):
        refused_line(capsys, *words)
        assert not output.exists(), words


def test_inputs_of_one_stem_become_sources_of_two_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("notes.jsonl", "notes.txt", "deep/notes.jsonl"):
        Path(place).parent.mkdir(exist_ok=True)
        text = json_lines(ROWS) if place.endswith("jsonl") else "A note in a file of its own.\n" * 9
        Path(place).write_text(text)
    assert main(["init", "--json"]) == 0
    names = [one["source"] for one in json.loads(capsys.readouterr().out)["sources"]]
    assert len(set(names)) == len(names) > 1
    rows = said(capsys, "prep-mixture")
    assert len({row["source"] for row in rows}) == len(names)
