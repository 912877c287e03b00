"""The page of a run whose pipeline has run: every section shows something, and what it cost."""

from pathlib import Path

import pytest

from nmoe_assets.verbs import costs
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.shards.documents import DocumentReader
from nmoe_core.tasks.curate import fit_topics
from nmoe_core.tasks.report.corpus import Corpus
from nmoe_core.tasks.report.sections import SECTIONS
from nmoe_core.tasks.report.write import write_report
from nmoe_core.text.tokenizer import load_tokenizer
from tests.assets.small_project import SOURCES, environment
from tests.project import read_rows, said


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.anchor)
def test_every_section_of_a_whole_run_is_shown(section, own_project: Path) -> None:
    shown = section.content(Corpus.of(Run(own_project / "run.toml")))
    assert "Not made yet" not in shown
    assert "Cannot be shown" not in shown
    # The labels of a heuristic cost nothing, and the project has no transforms.
    of_nothing = ("No model was asked", "No transform changed a document")
    kinds = ("<td", "<img", "<article", *of_nothing)
    assert section.attribute or any(made in shown for made in kinds)


def test_samples_are_kept_and_left_out_documents_of_all_sources_in_turn(
    own_project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("report", "--config", own_project / "run.toml", "--sample", 4)
    shown = said(capsys, *words)["samples"]
    grades = read_rows(*(own_project / "out" / "quality").rglob("*.jsonl"))
    decisions = {row["doc_id"]: row["decision"] for row in grades}
    kept, left_out = shown[:4], shown[4:]
    assert [bool(one["reason"]) for one in shown] == [False] * len(kept) + [True] * len(left_out)
    assert len({one["doc_id"] for one in shown}) == len(shown) == 8
    assert len({one["doc_id"].partition("//")[0] for one in kept}) > 1
    reader = DocumentReader(own_project / "out" / "data")
    tokenizer = load_tokenizer(Run(own_project / "run.toml").tokenizer)
    for one in shown:
        decision = decisions[one["doc_id"]]
        assert one["judged"].startswith(f"{decision}: ")
        assert (decision == "keep") == (one["reason"] == "")
        text = tokenizer.decode(reader.tokens(one["doc_id"])[:-1])
        assert text.startswith(one["text"].rstrip("\u2026"))
    assert main([*map(str, words)]) == 0
    printed = capsys.readouterr().out
    for one in shown:
        verdict = f"left out: {one['reason']}" if one["reason"] else "kept"
        assert f"{one['doc_id']}\n  {verdict} ({one['judged']})\n" in printed


def test_the_page_names_the_graders_and_the_time_of_the_runs(
    own_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(own_project / "run.toml")
    monkeypatch.setenv("DAGSTER_HOME", environment(own_project)["DAGSTER_HOME"])
    spent = costs(run)
    (whole,) = [row for row in spent if row["task"] == "pipeline"]
    assert whole["runs"] == 1
    assert whole["seconds"] > 0
    page, card, _ = write_report(run, tmp_path / "report" / "index.html", spent)
    text = page.read_text()
    for word in ("student", "probe", "judge", "pipeline", "whole", "data:image/png;base64,"):
        assert word in text
    assert "| judge | " in card.read_text()
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "none"))
    assert costs(run) == []


def test_the_page_shows_how_the_block_of_topics_of_states_was_chosen(own_project: Path) -> None:
    run = Run(own_project / "run.toml", {"curation.topics_from": "states"})
    made = fit_topics(run, SOURCES).facts
    (section,) = [one for one in SECTIONS if one.anchor == "diversity"]
    shown = section.content(Corpus.of(run))
    assert f"states after block {made['block']}," in shown
    for row in made["silhouettes"]:
        assert str(row["silhouette"]) in shown
    assert "random weights" in shown
