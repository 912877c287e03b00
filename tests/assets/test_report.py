"""The page of a run whose pipeline has run: every section shows something, and what it cost."""

from pathlib import Path

import pytest

from nmoe_assets.verbs import costs
from nmoe_core.config.run import Run
from nmoe_core.report.corpus import Corpus
from nmoe_core.report.sections import SECTIONS
from nmoe_core.report.write import write_report
from tests.assets.small_project import environment


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.anchor)
def test_every_section_of_a_whole_run_is_shown(section, own_project: Path) -> None:
    shown = section.content(Corpus.of(Run(own_project / "run.toml")))
    assert "Not made yet" not in shown
    assert "Cannot be shown" not in shown
    assert section.attribute or "<td" in shown or "<img" in shown


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
