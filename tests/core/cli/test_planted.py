"""A project in a directory of downloaded files: modules named as any that Python imports."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.tasks.graph.world import small_world
from tests.planted import Planted

NMOE = str(Path(sys.executable).with_name("nmoe"))


@pytest.mark.long
def test_no_verb_executes_a_module_of_the_working_directory(tmp_path: Path) -> None:
    small_world(tmp_path)
    planted = Planted(tmp_path)
    config = ("--config", "run.toml")
    manifest = "out/data/web/train/manifest.json"
    plan = "out/mixture/loader_plan.json"
    for words in (
        ("plan", *config),
        ("run", *config, "--set", "compute.workers=2"),
        ("report", "--html", "page/index.html", *config),
        ("select", "--where", "n_words > 6", *config),
        ("sql", "select count(*) from documents", *config),
        ("explain", "--step", "0", "--row", "0", *config),
        ("verify", "--checksums", manifest),
        ("inspect", "--manifest", manifest),
        ("info", plan),
        ("publish", plan, f"file://{tmp_path}/store"),
        ("export", "olmo", manifest, "--output", "exported"),
        ("init", "in"),
    ):
        done = subprocess.run([NMOE, *words], cwd=tmp_path, capture_output=True, text=True)
        assert planted.ran() == [], words
        assert "Traceback" not in done.stderr, (words, done.stderr)
        assert done.returncode == 0, (words, done.stderr)
