"""Each check fails on the damage it is for; only the run's `[checks]` says what that matters."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from loader.files.checksummed_json import sealed
from nmoe_assets.component import build_definitions
from nmoe_core.base.errors import ConfigError
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks import checks
from nmoe_core.tasks.checks import LEVELS, Verdicts
from nmoe_core.tasks.preview import plan_regrade

# A run of its own and a damaged copy for each check: minutes. The pipeline tests see all pass.
pytestmark = pytest.mark.slow

Edit = Callable[[dict[str, Any]], None]

# Of assets that a run without attributes does not have.
OF_ATTRIBUTES = {"rows", "ranges", "drift", "contamination"}


@pytest.fixture(scope="module")
def run(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of its own, so that it can be damaged."""
    directory = tmp_path_factory.mktemp("checked")
    shutil.copytree(finished, directory, dirs_exist_ok=True)
    return Run(directory / "run.toml")


def with_checks(run: Run, **table: Any) -> Run:
    return run.with_settings({f"checks.{key}": value for key, value in table.items()})


@contextmanager
def changed(path: Path, payload: bytes) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(payload)
    try:
        yield
    finally:
        path.write_bytes(before)


@contextmanager
def edited(path: Path, **values: Any) -> Iterator[None]:
    """A file that says something else and whose hash is that of what it says."""
    value = json.loads(path.read_bytes()) | values
    value = sealed(value) if "content_hash" in value else value
    with changed(path, json.dumps(value).encode()):
        yield


def failed(verdicts: Verdicts) -> set[str]:
    return {name for name, verdict in verdicts.items() if not verdict.passed}


def test_a_finished_run_passes_every_check(run: Run) -> None:
    found: Verdicts = {}
    for source in run_sources(run):
        name = source.name
        found |= checks.check_shards(run, name, "train", (0, 1))
        found |= checks.check_manifest(run, name, "train")
        found |= checks.check_slices(run, name)
        found |= checks.check_grades(run, name, (0, 1))
        found |= checks.check_topics(run, name, (0, 1))
        found |= checks.check_curated_shards(run, name, (0, 1))
        found |= checks.check_curated(run, name)
    found |= checks.check_leak(run, "docs") | checks.check_backbone(run)
    found |= checks.check_labels(run) | checks.check_calibration(run)
    found |= checks.check_head(run, "probe") | checks.check_head(run, "judge")
    found |= checks.check_topic_model(run) | checks.check_plan(run, run_sources(run))
    found |= checks.check_regrade(run, plan_regrade(run, ("code", "docs", "notes")))
    assert set(found) == set(LEVELS) - OF_ATTRIBUTES
    blocking = {name for name in failed(found) if LEVELS[name] == "block"}
    assert not blocking, {name: found[name].found for name in blocking}
    assert not [name for name, verdict in found.items() if not verdict.facts], "numbers to plot"


def test_a_flipped_token_fails_integrity_of_its_shard_alone(run: Run) -> None:
    shard = next((run.tree.split("code", "train") / "shard_0001").glob("*.npy"))
    payload = bytearray(shard.read_bytes())
    payload[-9] ^= 1
    with changed(shard, bytes(payload)):
        assert failed(checks.check_shards(run, "code", "train", (1,))) == {"integrity"}
        assert not failed(checks.check_shards(run, "code", "train", (0,)))
        assert "checksums" in failed(checks.check_manifest(run, "code", "train"))


def test_a_document_in_another_split_fails_the_rule(run: Run) -> None:
    directory = run.tree.slices / "sources" / "docs"
    train, val = (directory / f"docids_{split}.jsonl" for split in ("train", "val"))
    row, rest = train.read_bytes().split(b"\n", 1)
    with changed(val, val.read_bytes() + row + b"\n"), changed(train, rest):
        assert failed(checks.check_slices(run, "docs")) == {"split_rule"}
    with changed(train, rest):
        assert failed(checks.check_slices(run, "docs")) == {"split_rule"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"total": 1, "parsed": 1}, {"coverage"}),
        ({"parsed": 0}, set()),
        ({"rubric_hash": "another"}, {"one_scorer"}),
    ],
)
def test_labels_that_lack_mix_or_fail(run: Run, values: Any, expected: set[str]) -> None:
    path = run.tree.labels / "val" / "shard_3" / "summary.json"
    by_hand = json.dumps(json.loads(path.read_text()) | values).encode()
    with changed(path, by_hand):
        assert failed(checks.check_labels(run)) == {"coverage"}, "edited by hand"
    with edited(path, **values):
        assert failed(checks.check_labels(run)) == expected
        strict = with_checks(run, min_parse_rate=0.9999)
        has_failures = values.get("parsed") == 0
        assert ("parse_rate" in failed(checks.check_labels(strict))) == has_failures


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"tau_drop": 0.9, "tau_keep": 0.1}, "thresholds"),
        ({"achieved_keep": 0.999}, "calibrated_keep_rate"),
        ({"certificate": {"dropped": 9, "false_drops": 9}, "max_false_drop": 0.1}, "false_drops"),
        ({"num_dropped": 9, "num_false_drops": 9, "max_false_drop": 0.1}, "false_drops"),
    ],
)
def test_a_calibration_that_is_off(run: Run, values: Any, expected: str) -> None:
    with edited(run.tree.calibration / "calibration_summary.json", **values):
        assert expected in failed(checks.check_calibration(run))


def test_a_source_with_another_share_than_in_the_calibration_is_named(run: Run) -> None:
    count = 1000
    rows = [{"source": "all", "documents": count}, {"source": "code", "documents": count}]
    with edited(run.tree.calibration_summary, keep_by_source=rows, documents_report=count):
        found = checks.check_plan(run, run_sources(run))["keep_rate_of_all"]
    assert not found.passed
    assert "but 100.0% of the documents of the calibration" in found.found
    assert checks.check_plan(run, run_sources(run))["keep_rate_of_all"].passed


def test_grades_that_do_not_cover_the_shard_fail(run: Run) -> None:
    summary = run.tree.quality / "docs" / "shard_0000" / "summary.json"
    with edited(summary, kept=0):
        assert failed(checks.check_grades(run, "docs", (0,))) == {"counts"}
    other = json.loads(summary.read_bytes())["fingerprints"] | {"shard": "other"}
    with edited(summary, fingerprints=other):
        assert failed(checks.check_grades(run, "docs", (0,))) == {"counts"}
    strict = with_checks(run, max_keep_rate=0.0)
    assert failed(checks.check_grades(strict, "docs", (0, 1))) == {"keep_rate"}


def test_other_topics_another_plan_and_a_torn_checkpoint_fail(run: Run) -> None:
    topics = run.tree.topics / "docs" / "shard_0000" / "topics.npy"
    payload = topics.read_bytes()
    with changed(topics, payload[:-1] + bytes([payload[-1] ^ 255])):
        assert failed(checks.check_topics(run, "docs", (0,))) == {"topic_range"}
    manifest = run.tree.curated_manifest("docs")
    value = json.loads(manifest.read_bytes())
    value["shards"] = value["shards"][:-1]
    with changed(manifest, json.dumps(value).encode()):
        assert "digests" in failed(checks.check_plan(run, run_sources(run)))
    config = run.tree.checkpoint / "config.json"
    with changed(config, config.read_bytes()[:-20]):
        assert failed(checks.check_backbone(run)) == {"readable"}


def test_the_level_of_a_failed_check_is_configured(run: Run) -> None:
    levels = {"promotion": "warn", "diversity": "block"}
    graph = build_definitions(with_checks(run, levels=levels)).resolve_asset_graph()
    blocking = {key.name: graph.get(key).blocking for key in graph.asset_check_keys}
    known = {name: level for name, level in LEVELS.items() if name not in OF_ATTRIBUTES}
    assert blocking == {name: level == "block" for name, level in (known | levels).items()}
    with pytest.raises(ConfigError, match="unknown check"):
        checks.level_of(with_checks(run, levels={"promotoin": "warn"}), "promotion")


def test_a_warning_check_does_not_stop_downstream_assets(run: Run) -> None:
    lenient = with_checks(run, min_spearman=1.0, levels={"promotion": "warn"})
    strict = with_checks(run, min_spearman=1.0)
    for configured, calibrated in ((lenient, True), (strict, False)):
        with dg.DagsterInstance.ephemeral() as instance:
            job = build_definitions(configured).resolve_job_def("train_heads")
            done = job.execute_in_process(instance=instance, raise_on_error=False)
            made = instance.get_latest_materialization_event(dg.AssetKey(["hydra", "calibration"]))
            assert (made is not None) == calibrated
            assert done.success == calibrated
