"""Families of documents: intervals and bounds count their documents together."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.families import Alike, families_of
from nmoe_core.config.run import Run
from nmoe_core.quality.calibration.summary_file import read_calibration
from nmoe_core.quality.calibration.targets import Targets
from nmoe_core.quality.calibration.thresholds import Certificate, largest_certified
from nmoe_core.quality.families import families_of as families_of_run
from nmoe_core.quality.heads.head_files import read_header
from nmoe_core.tasks.checks import check_calibration
from tests.core.quality.calibration.scored import scored, write_val
from tests.core.quality.grading.small_run import SETTINGS, WORDS, nmoe
from tests.project import Project, contents, jsonl_source, said, write_project
from tests.refusals import refused, refused_line

BY_ID = {"pattern": r"^(s\d+)/"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A run of 60 sites, of which one has other ids, as far as its labels."""
    rows: list[dict[str, Any]] = []
    for i in range(1200):
        text = f"number {i} " + f"{WORDS[i % 3]} {i % 7} " * (1 + i % 5)
        site = f"s{i % 60}"
        name = f"{site}/{i}" if i % 60 else f"other {i}"
        rows.append({"id": name, "text": text, "site": site})
    settings: dict[str, Any] = SETTINGS | {
        "grading": {"grader": "student"},
        "attributes": {"columns": ["site"]},
        "calibration": {"max_false_drop": 0.5},
    }
    made = write_project(tmp_path_factory.mktemp("run"), [jsonl_source("web", rows)], settings)
    for words in ("prep-mixture", "hydra slices", "hydra oracle-label", "hydra merge-labels"):
        nmoe(made, words)
    return made


def _set(**keys: str) -> list[str]:
    return [f"--set=calibration.family.{name}={value}" for name, value in keys.items()]


def test_cards_and_thresholds_name_the_families_and_no_label_is_made_again(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = project.run.tree
    labels = contents(tree.labels)
    for words in ("train student", "hydra calibrate"):
        nmoe(project, words)
    alone = read_header(tree.student)["metrics"]
    bound_alone = read_calibration(tree.calibration_summary)["certificate"]
    card = tree.student.with_suffix(".md").read_text("utf-8")
    assert "families" not in card
    for words in ("train student", "hydra calibrate"):
        nmoe(project, words, *_set(**BY_ID))
    assert contents(tree.labels) == labels
    metrics = read_header(tree.student)["metrics"]
    assert metrics["spearman"] == alone["spearman"]
    assert 40 < metrics["families"] < metrics["n"]
    card = tree.student.with_suffix(".md").read_text("utf-8")
    assert f"on {metrics['n']} val documents of {metrics['families']} families" in card
    summary = read_calibration(tree.calibration_summary)
    assert 0 < summary["families_fit"] <= 60
    proof = summary["certificate"]
    assert proof["trials"] < proof["dropped"] or proof["dropped"] == 0
    assert "trials" not in bound_alone
    run = Run(project.config, {"calibration.family.pattern": BY_ID["pattern"]})
    assert check_calibration(run)["false_drops"].passed
    capsys.readouterr()
    rows = said(capsys, "plan", "--config", project.config, "--json")
    changed = [row for row in rows["outputs"] if "calibration.family" in str(row)]
    assert {row["key"] for row in changed} >= {"hydra/student", "hydra/calibration"}


def test_a_column_names_the_same_families_as_the_ids(project: Project) -> None:
    paths = sorted(project.run.tree.labels.glob("merged/labels_val.jsonl"))
    doc_ids = [line.split('"doc_id":"')[1].split('"')[0] for line in _lines(paths[0])]
    by_id = Run(project.config, {"calibration.family.pattern": BY_ID["pattern"]})
    by_column = Run(project.config, {"calibration.family.column": "site"})
    ours, theirs = (families_of_run(run) for run in (by_id, by_column))
    assert ours is not None
    assert theirs is not None
    names = ours(doc_ids)
    sites = theirs(doc_ids)
    has_site = np.char.startswith(names, "s")
    assert (names[has_site] == sites[has_site]).all()
    assert set(sites[~has_site]) <= {"s0"}
    assert len({*names[~has_site]}) == (~has_site).sum(), "each is a family of its own"


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8").replace('": "', '":"').splitlines()


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"pattern": "(["}, ["calibration.family", "not a regular expression"]),
        ({"column": "ingest_id"}, ["set pattern"]),
        ({"column": "host"}, ["E-CALIBRATION-FAMILY", "host", "[attributes] columns"]),
        ({"pattern": "^x/"}, ["E-CALIBRATION-FAMILY", "'^x/'", "calibration.family.pattern"]),
    ],
)
def test_families_that_nothing_names_are_one_clear_error(
    project: Project, capsys: pytest.CaptureFixture[str], keys: dict[str, str], parts: list[str]
) -> None:
    line = refused_line(capsys, "train", "student", "--config", str(project.config), *_set(**keys))
    for part in parts:
        assert part in line


def test_ids_of_a_file_name_families_without_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels, predictions = write_val(tmp_path, scored(0, 1200, (0.5, 0.5)))
    asked = ["hydra", "calibrate", "--labels", labels, "--predictions", predictions]
    asked += ["--out", tmp_path / "out", "--set=calibration.max_false_drop=0.2"]
    facts = said(capsys, *asked, *_set(pattern=r"^(d\d\d)"), "--json")["calibration"]
    assert facts["families_fit"] + facts["families_report"] == 100
    assert "families" in facts["dropping"] or facts["num_dropped"] == 0
    with refused("E-CALIBRATION-FAMILY"):
        run = Run(None, {"calibration.family.column": "site"})
        families = families_of_run(run)
        assert families is not None
        families(["d1"])


def test_the_bound_of_false_drops_holds_for_families_and_would_not_if_documents_were_counted() -> (
    None
):
    """Half of the documents can be dropped with a little more than the allowed share."""
    most = 0.2
    wrong = {"families": 0, "documents": 0}
    for trial in range(100):
        rng = np.random.default_rng(trial)
        families = families_of(20)(rng, 2000)
        alike: Any = Alike(rng, families, 0.8)
        scores = alike.random(2000)
        keeps = alike.random(2000) < np.where(scores < 0.5, 1.05 * most, 1.0)
        for name, drawn in (("families", families), ("documents", None)):
            targets = Targets(max_false_drop=most)
            wrong[name] += largest_certified(scores, keeps, targets, 1.0, families=drawn) > 0
    assert wrong["families"] <= 5
    assert wrong["documents"] > 5


def test_a_certificate_counts_families_as_equal() -> None:
    is_below = np.ones(200, np.bool_)
    is_wrong = np.arange(200) < 20
    alone = Certificate.of(is_below, is_wrong, 0.05)
    families = Certificate.of(is_below, is_wrong, 0.05, np.repeat(np.arange(20), 10))
    assert (families.num_below, families.num_wrong) == (alone.num_below, alone.num_wrong)
    assert families.num_trials == pytest.approx(20)
    assert families.upper95 > alone.upper95
