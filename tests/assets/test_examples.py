"""Every example of every `--help` is run on a copy of a finished project, and does what it says."""

import contextlib
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard

from loader import DeterministicLoader, resolve_plan
from loader.__main__ import main as loader
from loader.plan.file import load_plan
from nmoe_core.cli import build_parser, main
from nmoe_core.cli.help.examples import EXAMPLES
from tests.assets.example_effects import EFFECTS, LISTED, LOADER, NAMES
from tests.assets.small_project import append, copied
from tests.core.labels.oracles.server import JudgeServer
from tests.project import json_lines, read_rows

Output = pytest.CaptureFixture[str]
EXAMPLE_LINES = list(dict.fromkeys(line for lines in EXAMPLES.values() for line in lines))
RUN = [
    pytest.param(line, marks=[pytest.mark.slow, pytest.mark.timeout(900)] * effect.is_slow)
    for line, effect in EFFECTS.items()
]
_REPLAY = """#!/bin/sh
grep -q '"start": 0,' "$1" && echo 0 || echo 10
"""


def words_of(line: str) -> list[str]:
    return shlex.split(line.partition(" > ")[0])[1:]


@pytest.fixture(scope="module")
def template(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The finished project with the files that examples name."""
    project = copied(finished, tmp_path_factory.mktemp("template"))
    append(project, '\n[attributes]\nuse = ["signals", "language"]\n')
    (project / "run.toml").rename(project / "nmoe.toml")
    with contextlib.chdir(project):
        _write_files(read_rows(Path("in/docs.jsonl")))
        _write_plans()
    yield project
    shutil.rmtree(project)


def _write_files(rows: list[dict[str, Any]]) -> None:
    files = {name: json_lines(rows[:40]) for name in ("web.jsonl", "new.jsonl", "trusted.jsonl")}
    files["prompts.jsonl"] = json_lines({"id": i, "text": "def"} for i in "ab")
    files["fresh/corpus/docs.jsonl"] = json_lines(rows)
    files["gone.txt"] = "id:docs/docs.jsonl:282\n"
    files["replay.sh"] = _REPLAY
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    Path("replay.sh").chmod(0o755)
    Path("web").mkdir()
    Path("web/docs.jsonl.zst").write_bytes(zstandard.compress(json_lines(rows).encode()))
    Path("gpt-oss-20b").symlink_to("out/backbone")
    shutil.copy("out/labels/val/shard_0/scores.jsonl", "mine.jsonl")
    head = {"gate.weight": torch.full((1, 64), 0.5), "gate.bias": torch.zeros(1)}
    head |= {"domain.weight": torch.zeros(9, 64), "domain.bias": torch.zeros(9)}
    torch.save(head, "hydra_probe.pt")


def _write_plans() -> None:
    """The state of a loader; a plan over two sources, which lie in another tokenizer too."""
    plan = load_plan(Path("out/mixture/loader_plan.json"))
    with DeterministicLoader(plan, backend="numpy") as reader:
        reader.seek_step(2)
        Path("checkpoints").mkdir()
        Path("checkpoints/1200.json").write_text(json.dumps(reader.state_dict()))
    tokenizers = {"own": "o200k_harmony", "other": "cl100k_base"}
    for name in ("web", "code"):
        for directory, tokenizer in tokenizers.items():
            prep = f"nmoe prep --source jsonl --paths trusted.jsonl --name {name} --num-shards 1"
            prep += f" --output {directory}/{name}/train --tokenizer {tokenizer}"
            assert main(words_of(prep)) == 0
    datasets = [{"path": f"own/{name}", "weight": 1} for name in ("web", "code")]
    own = resolve_plan({"batch_size": 2, "seq_len": 64, "data": {"datasets": datasets}})
    Path("plan.json").write_text(own.placed_in(Path.cwd()).to_json())


@pytest.fixture
def project(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy to work in, as the working directory; it is removed again, since it is large."""
    directory = tmp_path / "project"
    shutil.copytree(template, directory, symlinks=True)
    monkeypatch.chdir(directory)
    monkeypatch.delenv("NMOE_CONFIG", raising=False)
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    monkeypatch.setattr("nmoe_core.tasks.ablate.result._MIN_STEPS", 2)  # the texts are small
    monkeypatch.setattr("nmoe_core.tasks.ablate.result.BATCH", 2)
    yield directory
    monkeypatch.undo()
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def numbers(template: Path) -> dict[str, int]:
    """What is in the project, counted from its files: its texts differ by the version of Python."""
    data = template / "out/data"
    sources = ("docs", "code", "notes")
    train = {name: _documents(data / name / "train") for name in sources}
    labels = {split: len(_labels(template, split)) for split in ("train", "val", "test")}
    return labels | {
        "docs": train["docs"],
        "rows": train["docs"] + _documents(data / "docs/valid"),
        "notes": train["notes"],
        "total": sum(train.values()),
        "shard": _documents(data / "docs/train/shard_0001"),
        "curated": _documents(template / "out/curated/docs/train"),
        "steps": _num_steps(template),
        "judged": len(read_rows(template / "mine.jsonl")),
    }


def _documents(directory: Path) -> int:
    return json.loads((directory / "manifest.json").read_text())["total_documents"]


def _num_steps(project: Path) -> int:
    plan = load_plan(project / "out/mixture/loader_plan.json")
    with DeterministicLoader(plan, backend="numpy") as reader:
        return len(reader)


def _labels(project: Path, split: str) -> list[dict[str, Any]]:
    files = sorted((project / "out/labels" / split).glob("shard_*/scores.jsonl"))
    return [row for path in files for row in read_rows(path)]


@pytest.fixture
def names(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Where the servers are that an example names."""
    example = request.getfixturevalue("example")
    if "s3://" in example:
        request.getfixturevalue("s3")
    server = JudgeServer() if "http://" in example else None
    yield {} if server is None else {"url": server.url}
    if server is not None:
        server.close()


def facts_of(capsys: Output, line: str) -> Any:
    capsys.readouterr()
    assert main([*words_of(line), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def find_names(example: str, capsys: Output) -> dict[str, str]:
    """A version, a document and a sentence of the project, for an example that names one."""
    if "5ea3e6" in example:
        listed = facts_of(capsys, "nmoe versions list data/web/train")
        return {"version": next(one["version"] for one in listed if not one["current"])}
    if "DOC_ID" in example:
        return {"doc_id": facts_of(capsys, "nmoe hydra review --documents 1")[0]["doc_id"]}
    if "best of times" not in example:
        return {}
    rows = facts_of(capsys, "nmoe explain --step 0")["rows"]
    ids = [document["ingest_id"] for row in rows for document in row["documents"]]
    number = next(one for one in ids if one.startswith("docs/")).rpartition(":")[2]
    text = read_rows(Path("in/docs.jsonl"))[int(number)]["text"]
    return {"sentence": max(re.findall(r"[A-Za-z ]+", text), key=len).strip()}


def rewritten(line: str, names: dict[str, str]) -> str:
    """The example in the names of the project."""
    for pattern, name in NAMES.items():
        named = name.format_map(names) if re.search(pattern, line) else ""
        line = re.sub(pattern, lambda _, named=named: named, line)
    return line


def test_every_example_has_an_effect_or_a_reason_why_it_is_not_run() -> None:
    assert sorted([*EFFECTS, *LISTED]) == sorted(EXAMPLE_LINES)
    assert [line for line, effect in EFFECTS.items() if not (effect.says or effect.makes)] == []
    for example in LISTED:
        assert callable(build_parser().parse_args(words_of(example)).run)


@pytest.mark.parametrize("example", RUN)
def test_an_example_of_help_does_what_it_says(
    example: str,
    project: Path,
    names: dict[str, str],
    numbers: dict[str, int],
    capsys: Output,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    effect = EFFECTS[example]
    for line in effect.before:
        assert main(words_of(line)) == 0, line
    line = rewritten(example, names | find_names(example, capsys))
    monkeypatch.chdir(project / effect.at)
    for made in map(Path, effect.makes):
        if made.is_dir():
            shutil.rmtree(made)
        made.unlink(missing_ok=True)
    capsys.readouterr()
    for part in line.split(" && "):
        assert main(words_of(part)) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert re.search(effect.says % numbers, printed), printed
    assert [made for made in effect.makes if not Path(made).exists()] == []


@pytest.mark.usefixtures("project")
def test_every_verb_of_the_loader_does_what_it_says(capsys: Output) -> None:
    with pytest.raises(SystemExit):
        loader(["--help"])
    assert re.findall(r"^    ([a-z-]+)\b", capsys.readouterr().out, re.MULTILINE) == list(LOADER)
    remix = next(line for line in EFFECTS if line.startswith("nmoe remix"))
    assert main(words_of(rewritten(remix, {}))) == 0
    capsys.readouterr()
    for verb, (words, says) in LOADER.items():
        assert loader([verb, *words.split()]) == 0
        printed = capsys.readouterr().out
        assert re.search(says, printed), printed
