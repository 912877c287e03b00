"""What a tick of automation reads from the storage, over sources of any number."""

from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster import AssetKey
from sqlalchemy import Engine, event

from nmoe_assets.component import build_definitions
from nmoe_core.config.run import Run
from tests.assets.daemon import Daemon
from tests.assets.small_project import tick
from tests.project import jsonl_source, write_project

Act = Callable[[Daemon, int], None]  # of a daemon, and how many sources it has
pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")


@pytest.fixture
def statements() -> Iterator[list[str]]:
    """The SQL that this process has sent; a test empties the list."""
    sent: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        sent.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    yield sent
    event.remove(Engine, "before_cursor_execute", note)


def _made_of(num_sources: int, directory: Path, instance: dg.DagsterInstance) -> Daemon:
    sources = [jsonl_source(f"source{i}", ()) for i in range(num_sources)]
    run = write_project(directory, sources, {"prep": {"num_shards": 2}}).run
    daemon = Daemon(build_definitions(run), instance)
    graph = daemon.defs.resolve_asset_graph()
    for key in graph.toposorted_asset_keys:
        partitions = graph.get(key).partitions_def
        for partition in partitions.get_partition_keys() if partitions else [None]:
            daemon.report(*key.path, version="1", partition=partition)
    daemon.pass_checks(graph.get_all_asset_keys())
    assert daemon.tick() == {}
    return daemon


def _selects(tmp_path: Path, statements: list[str], act: Act, table: str = "") -> tuple[int, int]:
    """The numbers of statements of `act` that read `table`, for two sources and for seven."""
    found = []
    for num_sources in (2, 7):
        with dg.DagsterInstance.ephemeral() as instance:
            daemon = _made_of(num_sources, tmp_path / str(num_sources), instance)
            statements.clear()
            act(daemon, num_sources)
            found.append([s for s in statements if table in s and s.startswith("SELECT")])
    few, many = map(len, found)
    return few, many


@pytest.mark.parametrize(
    ("changed", "table", "requested"),
    [
        ("elsewhere/asset", "", set()),  # all statements where nothing changed
        ("source0/curated_manifest", "asset_check_executions", {"mixture/loader_plan"}),
        ("hydra/calibration", "asset_check_executions", {"hydra/regrade_plan"}),
    ],
)
def test_a_tick_reads_statuses_of_all_sources_at_once(
    tmp_path: Path, statements: list[str], changed: str, table: str, requested: set[str]
) -> None:
    """Ticks are dear where each source is asked about by itself."""

    def act(daemon: Daemon, num_sources: int) -> None:
        daemon.report(*AssetKey(changed.split("/")).path, version="2")
        statements.clear()
        assert daemon.tick().keys() >= requested

    few, many = _selects(tmp_path, statements, act, table)
    assert 0 < many == few


def test_a_tick_after_a_change_of_a_setting_reads_only_what_the_setting_concerns(
    tmp_path: Path, statements: list[str]
) -> None:
    def act(daemon: Daemon, num_sources: int) -> None:
        assert daemon.tick() == {}
        config = tmp_path / str(num_sources) / "run.toml"
        daemon.defs = build_definitions(Run(config, {"batch_size": 2}))
        statements.clear()
        assert daemon.tick() == {"mixture/loader_plan": {None}}

    few, many = _selects(tmp_path, statements, act)
    assert 0 < many == few


def test_the_first_tick_that_watches_sources_reads_what_was_made_of_all_at_once(
    tmp_path: Path, statements: list[str]
) -> None:
    """It may request every source; over Dagster's limit of a tick, it would do so for ever."""

    def act(daemon: Daemon, num_sources: int) -> None:
        first = tick("source_watch", daemon.defs, daemon.instance, None)
        assert len(first.run_requests) == num_sources

    few, many = _selects(tmp_path, statements, act)
    assert 0 < many == few


def test_a_tick_that_opens_the_instance_keeps_nothing_for_the_end_of_the_process(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of a code location opens it some ten thousand times a day."""
    kept: list[object] = []
    monkeypatch.setattr("atexit.register", kept.append)
    with dg.DagsterInstance.from_ref(instance.get_ref()) as opened:
        assert opened.get_runs() == []
    assert kept == []
