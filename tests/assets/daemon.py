"""A daemon's ticks over events that a test reports."""

import itertools
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import SimpleNamespace
from unittest.mock import patch

import dagster as dg
from dagster import AssetKey, DagsterInstance

from nmoe_assets.dagster_private import CheckTarget
from nmoe_assets.ops import follow_changes
from nmoe_assets.partitions import RANGE_END, RANGE_START, label_partitions, range_tags
from tests.assets.dagster_internals import AssetMaterializationPlannedData, StepMaterializationData
from tests.assets.small_project import KEYS, SOURCES, tick

HEADS = ("backbone", "student", "probe_head", "judge_head", "calibration")


def of_each(*names: str) -> dict[str, set[str | None]]:
    """All partitions of these assets of each source."""
    return {f"{source}/{name}": set(KEYS) for source in SOURCES for name in names}


GRADES = of_each("quality_scores")
HEADS_AGAIN: dict[str, set[str | None]] = {"hydra/probe_head": {None}, "hydra/judge_head": {None}}
CALIBRATION: dict[str, set[str | None]] = {"hydra/calibration": {None}}
PLAN: dict[str, set[str | None]] = {"mixture/loader_plan": {None}}
REGRADE_PLAN: dict[str, set[str | None]] = {"hydra/regrade_plan": {None}}


class Daemon:
    """Ticks of the automation sensor over events that a test reports."""

    def __init__(self, defs: dg.Definitions, instance: DagsterInstance) -> None:
        self.defs, self.instance, self.cursor = defs, instance, None
        self._clock = itertools.count(1e9, 30)

    def report(self, *key: str, version: str, partition: str | None = None) -> None:
        tags = {"dagster/data_version": version}
        event = dg.AssetMaterialization(AssetKey(key), partition=partition, tags=tags)
        self.instance.report_runless_asset_event(event)

    def check(self, *key: str, name: str, passed: bool, run_id: str = "") -> None:
        """A verdict, in the run that made the asset or by itself."""
        verdict = dg.AssetCheckEvaluation(
            asset_key=AssetKey(key), check_name=name, passed=passed, metadata={}
        )
        event = dg.DagsterEvent(
            event_type_value="ASSET_CHECK_EVALUATION", job_name="job", event_specific_data=verdict
        )
        self.instance.report_dagster_event(event, run_id=run_id)

    def pass_checks(self, assets: Collection[AssetKey], run_id: str = "") -> None:
        for check in self.defs.resolve_asset_graph().asset_check_keys:
            if check.asset_key in assets:
                self.check(*check.asset_key.path, name=check.name, passed=True, run_id=run_id)

    def verify(self, *key: str) -> None:
        """All checks of an asset pass, about its newest event."""
        asset = AssetKey(key)
        [made] = self.instance.fetch_materializations(asset, limit=1).records
        target = CheckTarget(
            storage_id=made.storage_id, run_id=made.run_id, timestamp=made.timestamp
        )
        for check in self.defs.resolve_asset_graph().get_check_keys_for_assets({asset}):
            self.instance.report_runless_asset_event(
                dg.AssetCheckEvaluation(
                    asset, check.name, passed=True, metadata={}, target_materialization_data=target
                )
            )

    def start(self, job: str, *keys: str, partitions: Sequence[str] = KEYS) -> dg.DagsterRun:
        """A run over these partitions of assets of a job, at work."""
        return self.instance.create_run_for_job(
            job_def=self.defs.resolve_job_def(job),
            asset_selection=frozenset(AssetKey(key.split("/")) for key in keys),
            tags=range_tags(partitions),
            status=dg.DagsterRunStatus.STARTED,
        )

    def made(self, run: dg.DagsterRun, key: str, version: str, partition: str | None) -> None:
        """What a run logs of an output."""
        asset = AssetKey(key.split("/"))
        code = self.defs.resolve_asset_graph().get(asset).code_version
        tags = {"dagster/data_version": version, "dagster/code_version": code}
        materialization = dg.AssetMaterialization(asset, partition=partition, tags=tags)
        event = dg.DagsterEvent(
            event_type_value="ASSET_MATERIALIZATION",
            job_name=run.job_name,
            step_key="step",
            event_specific_data=StepMaterializationData(materialization),
        )
        self.instance.report_dagster_event(event, run_id=run.run_id)

    def makes(self, run: dg.DagsterRun, key: str, version: str) -> None:
        """A run makes all partitions of an asset and ends."""
        for partition in KEYS:
            self.made(run, key, version + partition, partition)
        self.end(run)

    def end(self, run: dg.DagsterRun) -> None:
        """It succeeds, its checks too."""
        self.pass_checks(run.asset_selection or (), run.run_id)
        event = dg.DagsterEvent(event_type_value="PIPELINE_SUCCESS", job_name=run.job_name)
        self.instance.report_dagster_event(event, run_id=run.run_id)

    def tick(self) -> dict[str, set[str | None]]:
        """The partitions that a tick requests, 30 s after the last one. Their runs are canceled
        before they do anything; a test reports what others did instead."""
        clock = SimpleNamespace(time=lambda: next(self._clock))
        with patch.object(follow_changes, "time", clock):
            found = tick("follow_changes", self.defs, self.instance, self.cursor)
        self.cursor = found.cursor or self.cursor
        requested: dict[str, set[str | None]] = {}
        for request in found.run_requests or ():
            run_id = str(uuid.uuid4())
            run = dg.DagsterRun(
                "job",
                run_id=run_id,
                asset_selection=frozenset(request.asset_selection),
                status=dg.DagsterRunStatus.CANCELED,
            )
            self.instance.add_run(run)
            for key in request.asset_selection:
                parts = self._partitions(key, request.tags)
                for part in parts:
                    self._plan(run_id, key, part)
                requested.setdefault("/".join(key.path), set()).update(parts)
        return requested

    def _partitions(self, key: AssetKey, tags: Mapping[str, str]) -> list[str | None]:
        defined = self.defs.resolve_asset_graph().get(key).partitions_def
        if defined is None:
            return [None]
        keys = defined.get_partition_keys()
        return [*keys[keys.index(tags[RANGE_START]) : keys.index(tags[RANGE_END]) + 1]]

    def _plan(self, run_id: str, key: AssetKey, partition: str | None) -> None:
        event = dg.DagsterEvent(
            event_type_value="ASSET_MATERIALIZATION_PLANNED",
            job_name="job",
            event_specific_data=AssetMaterializationPlannedData(key, partition=partition),
        )
        self.instance.report_dagster_event(event, run_id=run_id)

    def everything(
        self, version: str = "1", sources: Iterable[str] = ("code", "docs", "notes")
    ) -> None:
        for source in sources:
            self.shards(source, version)
        self.report("docs", "valid_shards", version=version, partition="0000")
        self.report("docs", "valid_manifest", version=version)
        for key in label_partitions.get_partition_keys():
            self.report("hydra", "oracle_labels", version=version, partition=key)
        for name in (*HEADS, "regrade_plan"):
            self.report("hydra", name, version=version)
        self.report("curation", "topic_model", version=version)
        for source in sources:
            self.curated(source, version)
        self.report("mixture", "loader_plan", version=version)
        self.pass_checks(self.defs.resolve_asset_graph().get_all_asset_keys())

    def source(self, source: str, version: str = "1") -> None:
        """The outputs of one source are made."""
        self.shards(source, version)
        self.curated(source, version)

    def shards(self, source: str, version: str = "1") -> None:
        """The outputs of one source up to its slices are made."""
        self.report(source, "documents", version=version)
        for key in KEYS:
            self.report(source, "shards", version=version + key, partition=key)
        for name in ("manifest", "docid_slices"):
            self.report(source, name, version=version)

    def curated(self, source: str, version: str = "1") -> None:
        """The outputs of one source from its scores on are made."""
        for name in ("quality_scores", "topics", "curated"):
            for key in KEYS:
                self.report(source, name, version=version + key, partition=key)
        self.report(source, "curated_manifest", version=version)


def of_finished(defs: dg.Definitions, instance: DagsterInstance) -> Daemon:
    """A daemon over a project whose outputs are all made."""
    daemon = Daemon(defs, instance)
    daemon.everything()
    assert daemon.tick() == {}
    return daemon
