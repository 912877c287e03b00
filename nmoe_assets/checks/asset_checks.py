"""The checks of one asset. `nmoe_core.tasks.checks` computes the verdicts; the run's `[checks]`
sets the level of a failure: `block` stops the assets that follow in the same run.

An asset checks its new output in the step that made it, which needs no second process and knows the
partitions of the run. Manifests and the plan have separate steps for their checks, so that a user
can run the checks again without making the asset.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from nmoe_assets.catalogue import to_metadata
from nmoe_assets.checks.history import FAILED_PARTITIONS, evaluation, failed_partitions, make_newest
from nmoe_assets.names import asset_key
from nmoe_assets.pods import pod_tags
from nmoe_core.config.run import Run
from nmoe_core.tasks import checks
from nmoe_core.tasks.checks import Verdict, Verdicts

# The other checks cover all partitions together, or the output of a run.
_OF_EACH_PARTITION = frozenset({"integrity", "counts", "topic_range", "rows", "ranges", "suffixes"})
_MOST_NAMED = 10


@dataclass(frozen=True)
class Checks:
    """The checks of one asset.

    Attributes:
        run: Sets the level of a failure.
        asset: Key of the asset without the mixture's prefix.
        names: Names of the checks.
        check: Returns all verdicts. Its argument is the list of partition keys that a run made; no
            argument if the asset is an unpartitioned file; the result itself if the asset writes no
            file.
    """

    run: Run
    asset: list[str]
    names: tuple[str, ...]
    check: Callable[..., Verdicts]

    @property
    def key(self) -> dg.AssetKey:
        """Key of the asset."""
        return asset_key(self.run, self.asset)

    def specs(self) -> list[dg.AssetCheckSpec]:
        """Declarations of the checks in the asset's definition."""
        return [
            dg.AssetCheckSpec(
                name,
                asset=self.key,
                blocking=checks.level_of(self.run, name) == "block",
                description=checks.DESCRIPTIONS[name],
            )
            for name in self.names
        ]

    def results(self, *made: Any) -> Iterator[dg.AssetCheckResult]:
        """Check an unpartitioned asset."""
        verdicts = self.check(*made)
        for name in self.names:
            yield self._result(name, verdicts[name])

    def results_of_partitions(
        self, context: dg.AssetExecutionContext, made: Sequence[str]
    ) -> Iterator[dg.AssetCheckResult]:
        """Check the partitions that a run made.

        In Dagster a check has one verdict for all partitions, so the verdict of this run also names
        partitions that failed earlier and were not made again.
        """
        try:
            verdicts = self.check(made)
            results = [
                self._of_partitions(context, name, verdicts[name], made) for name in self.names
            ]
        # BaseException, such as Terminate: checks that read every token take long
        except BaseException:
            self.log_unchecked(context, made)
            raise
        yield from results
        make_newest(context.instance, context.run.run_id, results)

    def log_unchecked(self, context: dg.AssetExecutionContext, made: Sequence[str]) -> None:
        """Log failed checks of partitions if a run ends before it has checked them."""
        verdict = Verdict(False, f"the run ended before it checked {_some(made)}")
        for name in self.names:
            if made and name in _OF_EACH_PARTITION:
                failed = [*made, *self._failed_before(context, name, made)]
                # Dagster accepts the evaluation of a check as this argument, but the parameter's
                # type does not include it.
                event: Any = evaluation(self._result(name, verdict, failed))
                context.log_event(event)

    def _of_partitions(
        self, context: dg.AssetExecutionContext, name: str, verdict: Verdict, made: Sequence[str]
    ) -> dg.AssetCheckResult:
        failed = list[str]()
        if name in _OF_EACH_PARTITION:
            if not verdict.passed:
                failed = [key for key in made if not self.check([key])[name].passed]
            if before := self._failed_before(context, name, made):
                found = f"{verdict.found}; failed earlier and not made again: {_some(before)}"
                verdict = Verdict(False, found, verdict.facts)
                failed += before
        return self._result(name, verdict, failed)

    def _failed_before(
        self, context: dg.AssetExecutionContext, name: str, made: Sequence[str]
    ) -> list[str]:
        """Existing partitions, not made by this run, that failed earlier."""
        check = dg.AssetCheckKey(self.key, name)
        partitions = context.assets_def.partitions_def
        others = set(partitions.get_partition_keys() if partitions else ()) - set(made)
        return sorted(others.intersection(failed_partitions(context.instance, check)))

    def _result(
        self, name: str, verdict: Verdict, failed: Sequence[str] = ()
    ) -> dg.AssetCheckResult:
        is_warning = checks.level_of(self.run, name) == "warn"
        facts = {key: to_metadata(key, value) for key, value in verdict.facts.items()}
        return dg.AssetCheckResult(
            check_name=name,
            asset_key=self.key,
            passed=verdict.passed,
            severity=dg.AssetCheckSeverity.WARN if is_warning else dg.AssetCheckSeverity.ERROR,
            description=verdict.found,
            metadata=facts | ({FAILED_PARTITIONS: ", ".join(failed)} if failed else {}),
        )

    def definition(self, stage: str) -> dg.AssetChecksDefinition:
        """The checks as a separate step, in the pod of a stage."""
        name = "__".join(["check", *self.key.path])
        tags = pod_tags(self.run, stage)

        @dg.multi_asset_check(name=name, specs=self.specs(), op_tags=tags)
        def check(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
            results = list(self.results())
            yield from results
            make_newest(context.instance, context.run.run_id, results)

        return check


def _some(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
    return ", ".join(keys[:_MOST_NAMED]) + more
