"""Two paths to one result agree: command and asset, preview and work, labels and grades."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks import curate
from nmoe_core.tasks.preview import plan_run
from nmoe_core.tasks.shards import each_shard, grade_sources, outputs_of
from nmoe_core.text.normalise import normalize_text
from tests.project import contents, json_lines, jsonl_source, read_rows, said, write_project

pytest.importorskip("torch")
WORDS = ("use the default value", "because each example", "returns a long explanation of it")
SETTINGS: dict[str, Any] = {
    "prep": {"num_shards": 2, "max_tokens": "all", "min_doc_tokens": 1},
    "backbone": {"kind": "tiny"},
    "heads": {"max_ctx": 16, "judge": {"mid_dim": 16, "num_heads": 4, "ffn_dim": 32}},
    "curation": {"include": ["keep", "band"], "num_topics": 3},
    "seq_len": 64,
}


def nmoe(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with thresholds, and without a grade."""
    rows = [
        {"id": f"d{i}", "text": f"number {i} " + f"{WORDS[i % 3]} {i % 7} " * (1 + i % 5)}
        for i in range(500)
    ]
    project = write_project(
        tmp_path_factory.mktemp("agreement"), [jsonl_source("web", rows)], SETTINGS
    )
    hydra = ("hydra slices", "hydra oracle-label", "train probe", "train judge", "hydra calibrate")
    for words in ("prep-mixture", *hydra):
        nmoe(*words.split(), "--config", project.config)
    return project.config


@pytest.mark.long
def test_the_command_grades_as_the_asset_does_at_any_number_of_workers(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("hydra", "grade", "--config", config, "--out", tmp_path / "command")
    told = said(capsys, *command, "--set", "compute.workers=2")
    run = Run(config, {"compute.workers": 1}, {"quality": tmp_path / "asset"})
    attempts = list(each_shard(run, "grade", "web", ["0000", "0001"]))
    made = {f"web/{one.key}": one.result.facts for one in attempts if one.result is not None}
    assert told == made
    asset = contents(tmp_path / "asset", "quality_scores.jsonl")
    assert contents(tmp_path / "command", "quality_scores.jsonl") == asset
    assert len(asset) == 2


@pytest.mark.parametrize(
    "rule",
    [pytest.param("", marks=pytest.mark.long), 'where = "n_words > 20 and n_words < 45"'],
    ids=["decision", "attributes"],
)
def test_the_command_selects_and_curates_as_the_assets_do_at_any_number_of_workers(
    config: Path, tmp_path: Path, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asset, command = tmp_path / "asset", tmp_path / "command"
    shutil.copytree(config.parent, asset)
    if rule:
        text = config.read_text().replace('include = ["keep", "band"]', rule)
        (asset / "run.toml").write_text(f'{text}\n[attributes]\nuse = ["signals"]\n')
    run = Run(asset / "run.toml", {"compute.workers": 1})
    grade_sources(run)
    shutil.copytree(asset, command)
    curate.open_topics(run, ["web"])
    for task in ("topics", *(("attributes/signals", "select") if rule else ()), "curate"):
        attempts = list(each_shard(run, task, "web", ["0000", "0001"]))
        assert all(one.error is None for one in attempts)
    facts = curate.combine(run, "web").facts
    given = ("--config", command / "run.toml", "--set", "compute.workers=2")
    if rule:
        said(capsys, "attributes", *given[:2])
        assert said(capsys, "select", *given)[0]["kept"] == facts["documents"] > 100
    told = said(capsys, "curate", "shards", *given)["sources"]["web"]
    assert {key: told[key] for key in facts} == facts | {"path": told["path"]}
    assert told["shards_written"] == 2
    # Locks are hidden; manifests hold the time, but the figures above hold what they name.
    for tree in ("topics", "curated", *(["attributes"] if rule else [])):
        made = contents(asset / "out" / tree, "[!.m]*")
        assert contents(command / "out" / tree, "[!.m]*") == made != {}


def test_the_preview_names_the_shards_that_are_then_graded_and_curated(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roots = {name: tmp_path / name for name in ("quality", "topics", "curated")}
    run = Run(config, None, roots)
    sources = run_sources(run)
    before = plan_run(run, sources)
    assert [shard.shard for shard in before.regrade.shards] == ["shard_0000", "shard_0001"]
    graded = grade_sources(run)
    documents = [facts.facts["documents"] for facts in graded.values()]
    assert [shard.documents for shard in before.regrade.shards] == documents
    assert plan_run(run, sources).regrade.shards == []
    curate.open_topics(run, ["web"])
    outputs_of(run, "topics", "web")
    for settings in ({}, {"curation.order": "shuffle"}, {"curation.order": "shuffle"}):
        run = Run(config, settings, roots)
        planned = set(plan_run(run, sources).curated["web"])
        done = outputs_of(run, "curate", "web")
        changed = {f"shard_{i:04d}" for i, made in done.items() if made.facts["changed"]}
        assert planned == changed


def test_the_dry_run_of_a_mixture_names_the_splits_that_are_then_made(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ("prep-mixture", "--config", config, "--data-root", tmp_path)
    planned, made = said(capsys, *command, "--dry-run"), said(capsys, *command)
    named = [(part["source"], part["split"], f"{part['output']}/manifest.json") for part in planned]
    assert named == [(part["source"], part["split"], part["manifest"]) for part in made]


def test_a_document_is_labelled_and_graded_under_one_id(config: Path, tmp_path: Path) -> None:
    run = Run(config, None, {"quality": tmp_path / "quality"})
    grade_sources(run)
    scores = sorted(run.tree.quality.rglob("quality_s*.jsonl"))
    graded = [row["doc_id"] for row in read_rows(*scores)]
    labelled = [
        row["doc_id"]
        for split in ("train", "val", "test")
        for row in read_rows(*[run.tree.label_shard(split, i) / "scores.jsonl" for i in range(8)])
    ]
    assert len(graded) == len(set(graded)) == 500
    assert len(labelled) == len(set(labelled)) > 400
    assert set(labelled) <= set(graded)


def test_every_label_of_a_json_line_meets_the_score_of_its_own_text(
    config: Path, tmp_path: Path
) -> None:
    # Texts that differ, some of them only before normalisation; their lines take every form.
    texts, lines = [], []
    for i in range(64):
        words = " ".join(" and ".join(WORDS).split()[: 3 + i % 11])
        texts.append(f"Number {i}. {words}\r\ncafe\u0301 {i}\x00 ")
        row: dict[str, Any] = {"text": texts[-1]}
        row |= [{}, {"id": f"given-{i}"}, {"doc_id": f"named-{i}", "id": 7}, {"id": None}][i % 4]
        row |= {"source": "elsewhere"} if i % 5 == 0 else {}
        lines.append(json.dumps(row) + "\n" + ("\n" if i % 9 == 0 else ""))
    file, labels, grades = (tmp_path / name for name in ("off.jsonl", "labels", "grades"))
    file.write_text("\ufeff" + "".join(lines), "utf-8")
    named = ["--config", config, "--input-jsonl", file, "--quiet"]
    nmoe("hydra", "oracle-label", *named, "--out", labels)
    nmoe("hydra", "grade", *named, "--set=grading.early_exit=false", "--out", grades)
    labelled = read_rows(labels / "scores.jsonl")
    graded = read_rows(grades / "quality_scores.jsonl")
    # What the oracle was shown is the text as prep would have written it.
    shown = [normalize_text(text).replace("\n", " ") for text in texts]
    assert [row["snippet"] for row in labelled] == shown
    ids = [(row["doc_id"], row["source"]) for row in labelled]
    assert [(row["doc_id"], row["source"]) for row in graded] == ids
    assert len(set(ids)) == 64

    # Rows of grading that say of each text what its label says, by their place in the file: only
    # if ids mean the same documents does calibration find perfect agreement.
    for row, label in zip(graded, labelled):
        row["scores"] = label["scores"]
    told = tmp_path / "quality_scores.jsonl"
    told.write_text(json_lines(graded))
    given = ["--labels", labels / "scores.jsonl", "--predictions", told]
    nmoe("hydra", "calibrate", *given, "--out", tmp_path / "last")
    summary = json.loads((tmp_path / "last" / "calibration_summary.json").read_text())
    assert summary["left_out"]["without_prediction"] == 0
    assert summary["heads"]["judge"]["spearman"] == 1.0
