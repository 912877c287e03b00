"""The example that does the whole job without Dagster, run as a user runs it."""

import os
import re
import sys
from pathlib import Path

import pytest

from nmoe_core.cli.project.write_docstrings import docstrings
from tests.project import REPOSITORY, contents, json_lines, output_of

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def test_the_example_goes_from_documents_to_batches_and_makes_nothing_twice(tmp_path: Path) -> None:
    for module in ("torch", "sklearn"):
        pytest.importorskip(module)
    modules = sorted(Path(os.__file__).parent.glob("[a-d]*.py"))
    rows = [row for path in modules for row in docstrings(path, path.stem, min_chars=121)]
    (tmp_path / "notes.jsonl").write_text(json_lines(rows), encoding="utf-8")
    script = REPOSITORY / "examples" / "whole_job.py"
    command = (sys.executable, script, tmp_path / "notes.jsonl", tmp_path / "project")
    printed = output_of(*command, env=ENVIRONMENT)
    assert re.findall(r"^([a-z]+)", printed, re.MULTILINE) == [
        *("prep", "label", "calibrate", "grade", "curate"),
        *["step"] * 10,
    ]
    assert f"label: {len(rows)} documents" in printed
    kept = re.search(r"curate: (\d+) documents kept", printed)
    assert kept
    assert 0 < int(kept[1]) < len(rows)
    before = contents(tmp_path / "project")
    assert output_of(*command, env=ENVIRONMENT) == printed
    assert contents(tmp_path / "project") == before
