"""Commands on a run in a bucket: they take URLs, and their answers name files by URLs."""

import json
from pathlib import Path
from typing import Any

import pytest

from loader.files.stores import store
from nmoe_core.cli import main
from tests.buckets import digests_of, other_machine
from tests.crash.project import SETTINGS, rows_of, run_task
from tests.project import Project, jsonl_source, write_project

ROOT = "s3://corpus/web"
PLAN = f"{ROOT}/mixture/loader_plan.json"
TASKS = ("prep-mixture", "hydra grade", "attributes", "curate shards", "loader plan")


@pytest.fixture
def project(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A curated run in a bucket, as a machine sees it that has none of its files."""
    source = jsonl_source("web", rows_of(0, 120), valid_split="train[:5%]", tokens_b=1e-6)
    rules = {"grading": {"grader": "none"}, "attributes": {"use": ["signals"]}, "root": ROOT}
    made = write_project(tmp_path / "project", [source], SETTINGS | rules)
    with other_machine(monkeypatch, tmp_path / "first"):
        for task in TASKS:
            assert run_task(made.directory, task) == 0, task
    monkeypatch.setenv("NMOE_SCRATCH", str(tmp_path / "scratch"))
    return made


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    """What a command prints as JSON."""
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def named(project: Project, directory: Path) -> Path:
    """A list for `nmoe takedown` with two documents of the run."""
    path = directory / "gone.txt"
    path.write_text("id:d7\nid:d8\n")
    return path


def test_answers_name_files_of_a_bucket_by_their_urls(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ("--config", project.config)
    gone = named(project, tmp_path)
    manifest = f"{ROOT}/data/web/train/manifest.json"
    for words in (
        ("takedown", gone, *config),
        ("takedown", gone, *config, "--plan", PLAN),
        ("inspect", "--manifest", manifest, "--sample", 1),
        ("report", *config),
        ("plan", *config),
        ("versions", "list", f"{ROOT}/data/web/train"),
    ):
        found = json.dumps(answer(capsys, *words))
        assert "scratch" not in found, words
        if words[0] == "takedown":
            assert f"earlier versions in {ROOT}" in found


def test_a_plan_is_published_from_one_bucket_to_another(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(capsys, "publish", PLAN, "s3://corpus/published")
    published = "s3://corpus/published/mixture/loader_plan.json"
    assert answer(capsys, "verify", published, "--deep")["ok"]


def test_plans_made_from_a_plan_lie_beside_it_in_the_bucket(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{ROOT}/mixture/other.json"
    data = f"more={ROOT}/data/web/train"
    words = ["remix", PLAN, "--step", 1, "--weights", "more=1", "--remove", "web"]
    words += ["--add", data, "-o", url]
    assert answer(capsys, *words)["plan"] == url
    assert answer(capsys, "info", url)["train"].keys() == {"web", "more"}
    url = f"{ROOT}/mixture/masked.json"
    mask = ("--mask", PLAN, "-o", url, "--config", project.config)
    assert answer(capsys, "takedown", named(project, tmp_path), *mask)["plan"] == url
    assert answer(capsys, "verify", url)["ok"]
    url = f"{ROOT}/mixture/twin.json"
    source = ("--source", f"web={ROOT}/curated/web/train", "--seq-len", 64)
    assert answer(capsys, "twin", PLAN, *source, "-o", url)["plan"] == url
    assert answer(capsys, "verify", url)["ok"]
    made = {f"mixture/{name}.json" for name in ("other", "masked", "twin")}
    assert made < digests_of(ROOT).keys()


@pytest.mark.parametrize("is_here", [True, False])
def test_a_new_plan_is_refused_if_it_would_lie_apart_from_its_data(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_here: bool
) -> None:
    output = tmp_path / "other.json" if is_here else f"{ROOT}/mixture/other.json"
    before = {one.path for one in store.listing(ROOT)}
    words = ["remix", PLAN, "--step", "1", "--weights", "web=1", "-o", str(output)]
    if not is_here:
        local = write_project(
            tmp_path / "more", [jsonl_source("more", rows_of(0, 40))], {"prep": SETTINGS["prep"]}
        )
        assert run_task(local.directory, "prep-mixture") == 0
        words[5] = "web=1,more=1"
        words += ["--add", f"more={local.directory}/out/data/more/train"]
    capsys.readouterr()
    assert main(words) == 1
    assert "[E-PLAN-PLACE]" in capsys.readouterr().err
    assert not (tmp_path / "other.json").exists()
    assert {one.path for one in store.listing(ROOT)} == before


@pytest.mark.usefixtures("s3")
def test_a_url_in_no_root_of_a_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["publish", "s3://corpus/elsewhere/plan.json", "s3://corpus/published"],
        ["remix", PLAN, "--step", "1", "--weights", "web=1", "--add", "web=s3://corpus/elsewhere"],
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert "[E-PATH-URL] no run keeps files" in capsys.readouterr().err
