"""What `nmoe plan` foretells is what `nmoe run`, a job of Dagster and automation then make."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from dagster import AssetKey

from nmoe_assets.component import build_definitions
from nmoe_assets.partitions import range_tags
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from tests.assets.daemon import Daemon
from tests.assets.small_project import execute, failures, opened
from tests.core.tasks.graph.world import marks, not_current

pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")
Edit = Callable[[Path], None]
# What automation leaves to a person.
BY_HAND = ("shards", "manifest", "docid_slices", "valid_shards", "valid_manifest")
BY_HAND += ("oracle_labels", "backbone", "topic_model")


def setting(line: str) -> Edit:
    """A setting of the run's TOML, in its table, instead of one that is there."""
    table, _, assignment = line.rpartition(":")
    key = assignment.partition(" ")[0]

    def edit(project: Path) -> None:
        config = project / "run.toml"
        tables = re.split(r"^(?=\[)", config.read_text(), flags=re.MULTILINE)
        header = f"[{table}]\n" if table else ""
        place = next((i for i, one in enumerate(tables) if header and one.startswith(header)), 0)
        if header and not tables[place].startswith(header):
            tables.append(header)
            place = len(tables) - 1
        others = tables[place].removeprefix(header).splitlines(keepends=True)
        others = [one for one in others if not one.startswith(f"{key} ")]
        tables[place] = "".join([header, f"{assignment}\n", *others])
        config.write_text("".join(tables))

    return edit


def other_document(project: Path) -> None:
    path = project / "in" / "docs.jsonl"
    first, *others = path.read_text().splitlines()
    row = json.loads(first) | {"text": "Another text about parsing, in place of the first one."}
    path.write_text("\n".join([json.dumps(row), *others, ""]))


def new_document(project: Path) -> None:
    with open(project / "in" / "docs.jsonl", "a") as file:
        file.write(json.dumps({"text": "A new text about logging that was not there before."}))
        file.write("\n")


EDITS: dict[str, Edit] = {
    "order": setting("curation:order = 'shuffle'"),
    "batch": setting(":batch_size = 2"),
    "target": setting("calibration:target_keep = 0.3"),
    "probe": setting("heads.probe:lr = 0.01"),
    "topics": setting("curation:num_topics = 6"),
    "oracle": setting("oracle:max_doc_tokens = 400"),
    "prep": setting("prep:min_doc_tokens = 12"),
    "document": other_document,
    "new document": new_document,
}


def by_command(project: Path) -> None:
    assert main(["run", "--config", str(project / "run.toml")]) == 0


def by_job(project: Path) -> None:
    done = execute(project)
    assert done.returncode == 0, failures(done)


def by_automation(project: Path) -> None:
    """What a person starts, and then all that the daemon requests."""
    definitions = build_definitions(Run(project / "run.toml"))
    with opened(project) as instance:
        daemon = Daemon(definitions, instance)
        daemon.cursor = CURSORS[project]
        follow(daemon)
        left = {key for key, _ in not_current(Run(project / "run.toml"))}
        for job in ("prep", "prep_valid", "label"):
            if any(key.rpartition("/")[2] in BY_HAND for key in left):
                done = definitions.resolve_job_def(job).execute_in_process(instance=instance)
                assert done.success
        for key in ("hydra/backbone", "curation/topic_model"):
            if key in left:
                make(daemon, key, set())
        follow(daemon)


CURSORS: dict[Path, object] = {}


def follow(daemon: Daemon) -> None:
    """Make what is requested until there is no more of it."""
    while requested := daemon.tick():
        for key, partitions in requested.items():
            make(daemon, key, {one for one in partitions if one is not None})


def make(daemon: Daemon, key: str, partitions: set[str]) -> None:
    job = daemon.defs.resolve_implicit_global_asset_job_def()
    done = job.execute_in_process(
        instance=daemon.instance,
        asset_selection=[AssetKey(key.split("/"))],
        tags=range_tags(sorted(partitions)) if partitions else {},
    )
    assert done.success


WAYS = {"nmoe run": by_command, "dagster job execute": by_job, "automation": by_automation}
MARKS = {("order", "nmoe run"): [pytest.mark.long], ("batch", "automation"): []}


@pytest.mark.parametrize(
    ("edit", "way"),
    [
        pytest.param(edit, way, marks=MARKS.get((edit, way), pytest.mark.slow))
        for edit in EDITS
        for way in WAYS
    ],
)
def test_previews_match_the_outputs_of_commands_and_assets(
    own_project: Path, edit: str, way: str
) -> None:
    config = own_project / "run.toml"
    assert not_current(Run(config)) == {}
    if way == "automation":
        with opened(own_project) as instance:
            daemon = Daemon(build_definitions(Run(config)), instance)
            assert daemon.tick() == {}
            CURSORS[own_project] = daemon.cursor
    EDITS[edit](own_project)
    run = Run(config)
    foretold, before = not_current(run), marks(run)
    assert foretold
    WAYS[way](own_project)
    after = marks(run)
    written = {place for place in after if after[place] != before.get(place)}
    sure = {place for place, status in foretold.items() if status != "open"}
    assert sure <= written <= foretold.keys()
    assert not_current(run) == {}
