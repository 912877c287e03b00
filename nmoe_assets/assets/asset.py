"""Builds the Dagster definition of one asset."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import dagster as dg

from nmoe_assets.assets.events import (
    Events,
    materialize_partitions,
    materialize_unpartitioned,
    picture_link,
)
from nmoe_assets.catalogue import Columns, asset_metadata, column_lineage, with_facts
from nmoe_assets.checks.asset_checks import Checks
from nmoe_assets.names import WHY, asset_key, prefixed
from nmoe_assets.partitions import shard_partitions
from nmoe_assets.pods import pod_tags
from nmoe_assets.resources import Machine
from nmoe_core.base.result import Result
from nmoe_core.config.run import Run
from nmoe_core.tasks.checks import Verdicts
from nmoe_core.tasks.shards import Attempt, ShardTask, each_shard

Deps = Sequence[Sequence[str] | dg.AssetDep]


@dataclass(frozen=True, kw_only=True)
class Asset:
    """Definition of an asset.

    Attributes:
        run: The run that the asset belongs to.
        key: The asset's key; like all keys in this class, it has no mixture prefix.
        group: The asset's group in the lineage.
        stage: The part of the pipeline, shown as a tag.
        kind: Kind of the output, shown as a badge.
        description: The description; `facts` adds explanations of the page's metadata.
        facts: Names of the facts to explain.
        code_version: Version of the asset's code and of the settings that it reads.
        deps: Inputs.
        downstream: Keys of the assets that read this asset.
        columns: Columns of the output's rows, each with its parent columns.
        pool: The pool in which the step takes a slot.
        partitions: None for an unpartitioned asset.
        max_age_days: Age in days at which the asset is shown as overdue; None for never.
        checks: Names of the checks that run in the step of the asset.
        check: Function of the checks; see `Checks.check`.
    """

    run: Run
    key: list[str]
    group: str
    stage: str
    kind: str
    description: str
    facts: tuple[str, ...] = ()
    code_version: str
    deps: Deps = ()
    downstream: Sequence[list[str]] = ()
    columns: Columns = ()
    pool: str | None = None
    partitions: dg.PartitionsDefinition[str] | None = None
    max_age_days: int | None = None
    checks: tuple[str, ...] = ()
    check: Callable[..., Verdicts] = lambda *made: {}

    @property
    def own_checks(self) -> Checks:
        """The checks that run in the step of the asset."""
        return Checks(self.run, self.key, self.checks, self.check)

    def unpartitioned(self, make: Callable[[], Result], picture: str = "") -> dg.AssetsDefinition:
        """An unpartitioned asset whose output `make` returns; `picture` is the metadata key of the
        link to its pictures, if it has some."""
        shown = {picture: picture_link(self.key)} if picture else None

        def work(context: dg.AssetExecutionContext, machine: Machine) -> dg.MaterializeResult:
            return materialize_unpartitioned(context, machine, make, self.own_checks, shown)

        return self.definition(work)

    def partitioned(
        self,
        make: Callable[[Sequence[str]], Iterable[Attempt]],
        show: Callable[[str, Result], Mapping[str, Any]] = lambda key, result: {},
        show_whole: Callable[[], Mapping[str, Any]] = dict,
    ) -> dg.AssetsDefinition:
        """A partitioned asset; see `materialize_partitions`."""

        def work(context: dg.AssetExecutionContext, machine: Machine) -> Events:
            checks = self.own_checks
            yield from materialize_partitions(context, machine, make, checks, show, show_whole)

        return self.definition(work)

    def sharded(
        self,
        task: ShardTask,
        source: str,
        show: Callable[[str, Result], Mapping[str, Any]] = lambda key, result: {},
    ) -> dg.AssetsDefinition:
        """A partitioned asset whose output a task makes, one partition per training shard of a
        source."""
        whole = replace(self, partitions=shard_partitions(self.run.config.prep.num_shards))
        return whole.partitioned(lambda keys: each_shard(self.run, task, source, keys), show)

    def definition(self, work: Callable[..., Any]) -> dg.AssetsDefinition:
        """The Dagster definition with a given function for the step."""
        run = self.run
        most = self.run.config.automation.max_partitions_per_run
        key = asset_key(run, self.key)
        deps = []
        for dep in self.deps:
            path = dep.asset_key.path if isinstance(dep, dg.AssetDep) else dep
            mapping = dep.partition_mapping if isinstance(dep, dg.AssetDep) else None
            deps.append(dg.AssetDep(asset_key(run, path), partition_mapping=mapping))
        downstream = [asset_key(run, key) for key in self.downstream]
        age = timedelta(days=self.max_age_days) if self.max_age_days else None
        decorate = dg.asset(
            key=key,
            deps=deps,
            check_specs=self.own_checks.specs(),
            code_version=self.code_version,
            partitions_def=self.partitions,
            backfill_policy=dg.BackfillPolicy(most if self.partitions else None),
            freshness_policy=dg.FreshnessPolicy.time_window(age) if age else None,
            group_name=prefixed(run, self.group),
            pool=self.pool,
            op_tags=pod_tags(run, self.stage),
            kinds={self.kind},
            description=with_facts(self.description, *self.facts),
            owners=list(run.config.automation.owners),
            tags={"stage": self.stage},
            metadata={
                **asset_metadata(columns=self.columns, downstream=downstream),
                "why it is stale": dg.MetadataValue.url(f"{WHY}{'/'.join(self.key)}"),
                **column_lineage(self.columns, key, [dep.asset_key for dep in deps]),
            },
        )
        return decorate(work)
