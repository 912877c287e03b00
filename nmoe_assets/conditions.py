"""Automation: outputs follow the content of their inputs, never the times of files.

An asset is due if its code version or the content of an input changed, and, if `[automation]` has
`make` for its kind, also if it is missing at the first evaluation or was wiped. An asset that is
due waits for inputs that are missing, due, running or requested, or have not passed a blocking
check. An input that you make by hand may stay due for ever, so its current version is used unless
its last run failed. Assets that read shards wait while a blocking check of the manifest, such as
the checksums, has failed. Scores follow the calibration, which names heads and backbone, and not
the heads directly: grading refuses new heads with an old calibration. Dagster proposes assets that
may be stale; the fingerprints beside the files decide.
"""

import functools
from collections.abc import Collection, Sequence
from operator import or_
from typing import Any

import dagster as dg

from nmoe_assets.inputs import CHANGED_MEANWHILE
from nmoe_assets.names import asset_key, prefixed
from nmoe_core.config.attributes import BUILT_IN
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources

# For each of these assets, the manifest whose checks read the asset's bytes.
_CHECKED_BY = {
    "shards": "manifest",
    "valid_shards": "valid_manifest",
    "curated": "curated_manifest",
}
Condition = dg.AutomationCondition[Any]  # the key of an asset or of a check
_AC = dg.AutomationCondition
_KINDS = {
    **dict.fromkeys(("shards", "manifest", "valid_shards", "valid_manifest"), "prep"),
    "docid_slices": "prep",
    **dict.fromkeys(("student", "probe_head", "judge_head", "calibration"), "heads"),
    **dict.fromkeys(("quality_scores", "regrade_plan"), "grade"),
    **dict.fromkeys((*BUILT_IN, "selection"), "curate"),
    **dict.fromkeys(("topics", "curated", "curated_manifest", "seen_index"), "curate"),
    **dict.fromkeys(("loader_plan", "published_plan"), "curate"),
}
_BEHIND_CALIBRATION = ("backbone", "student", "probe_head", "judge_head")
_code_changed = _AC.code_version_changed()
_in_progress = _AC.run_in_progress() | _AC.backfill_in_progress()
_failed = _AC.execution_failed()
# Dagster uses the newest execution of a check; an execution without a verdict has not passed.
_unusable = (
    _AC.missing() | _in_progress | _AC.any_checks_match(~_AC.check_passed(), blocking_only=True)
)
_damaged = _AC.any_checks_match(_AC.check_failed(), blocking_only=True)


def automation(run: Run, key: Sequence[str], inputs: Collection[dg.AssetDep]) -> Condition | None:
    """The condition that requests the asset of a key (without the mixture's prefix); None for
    never.

    A tick evaluates every node of every condition for every input, so conditions here have no
    redundant nodes. `asset_matches` is cheaper than `any_deps_match`, which reads the status of
    each input separately.
    """
    mode = mode_of(run, key[-1])
    if mode == "off":
        return None
    holds_up = _in_progress if mode == "make" else _in_progress | _AC.missing()
    unread = _unread(run, asset_key(run, key))
    deps = {one.asset_key: one.partition_mapping for one in inputs}
    for dep, mapping in deps.items():
        if dep.path[-2:] == ["attributes", "duplicates"]:  # made with `curation/duplicates`
            continue
        is_followed = mode_of(run, dep.path[-1]) != "off"
        if dep not in unread:
            state = _not_ready(_unread(run, dep)) if is_followed else _unusable | _failed
            if is_followed and isinstance(mapping, dg.AllPartitionMapping):
                state |= _not_made(_unread(run, dep))
            holds_up |= _AC.asset_matches(dep, state)
            if dep.path[-1] == "oracle_labels":
                holds_up |= _AC.asset_matches(dep, _of_other_documents(run))
            if (checked_by := _CHECKED_BY.get(dep.path[-1], key[-1])) != key[-1]:
                manifest = dg.AssetKey([*dep.path[:-1], checked_by])
                holds_up |= _AC.asset_matches(manifest, _damaged)
        elif is_followed:
            holds_up |= _AC.asset_matches(dep, _due_input(_unread(run, dep)))
    due = _due(mode, [dep for dep in deps if dep not in unread], unread)
    return (due & ~holds_up.with_label("waits")).with_label(mode)


def _unread(run: Run, key: dg.AssetKey) -> tuple[dg.AssetKey, ...]:
    """Inputs of an asset whose changes do not trigger it."""
    if key.path[-1] == "quality_scores":
        return tuple(asset_key(run, ("hydra", name)) for name in _BEHIND_CALIBRATION)
    if key.path[-1] in ("shards", "valid_shards"):
        return (dg.AssetKey([*key.path[:-1], "documents"]),)
    return ()


@functools.cache
def _not_ready(ignored: tuple[dg.AssetKey, ...]) -> Condition:
    """True for an input that cannot be used yet, or will be made again; `ignored` as in
    `_due_input`."""
    return _unusable | _AC.will_be_requested() | _due_input(ignored)


@functools.cache
def _due_input(ignored: tuple[dg.AssetKey, ...]) -> Condition:
    """True for an input whose own inputs (except `ignored`) changed, until the input is made from
    the changed inputs. A request does not reset the condition, since a request may not lead to a
    run. A run that appears in the same tick as new code does not reset it either, since this run
    may have used the old code."""
    changed = _code_changed | _any_deps(_AC.data_version_changed(), ignored)
    return _code_changed | changed.since(_AC.newly_updated())


@functools.cache
def _not_made(ignored: tuple[dg.AssetKey, ...]) -> Condition:
    """True for an input that is new and will be made again. If an asset reads all partitions of an
    input, `_not_ready` does not detect this: Dagster never reports the input as about to be
    requested, since no run makes both."""
    return _AC.newly_updated() & _outdated(ignored)


def _of_other_documents(run: Run) -> Condition:
    """True for labels of earlier documents, which heads and thresholds would refuse. Labelling may
    cost money, so you start it by hand."""
    shards = (asset_key(run, (source.name, "shards")) for source in run_sources(run))
    changed = (_AC.asset_matches(key, _AC.data_version_changed()) for key in shards)
    waits = functools.reduce(or_, changed).since(_AC.newly_updated())
    return waits.with_label("labels belong to other documents")


def _any_changed(deps: Collection[dg.AssetKey]) -> Condition:
    """True if the code of the asset or the content of one of these inputs changed."""
    inputs = (_AC.asset_matches(dep, _AC.data_version_changed()) for dep in deps)
    return functools.reduce(or_, inputs, _code_changed)


def mode_of(run: Run, name: str) -> str:
    """The mode of `[automation]` for assets of a name: `off`, `follow` or `make`."""
    kind = "curate" if name in run.config.attributes.files else _KINDS.get(name)
    if name == run.config.calibration.target_by:  # thresholds need the attribute `language`
        kind = "prep"
    return "off" if kind is None else getattr(run.config.automation, kind)


def _any_deps(condition: Condition, ignored: Collection[dg.AssetKey]) -> Any:
    found = _AC.any_deps_match(condition)
    return found.ignore(dg.AssetSelection.assets(*ignored)) if ignored else found


def _outdated(ignored: Collection[dg.AssetKey]) -> Condition:
    """True for a new output that was not made from the current inputs."""
    meanwhile = _AC.any_new_update_has_run_tags(tag_keys={CHANGED_MEANWHILE})
    # If both changed in the same tick, Dagster compares their times.
    after = _any_deps(_AC.newly_updated(), ignored).since(_AC.newly_updated())
    return (
        meanwhile.with_label("an input changed during the run")
        | after.with_label("an input changed after the run")
        | _code_changed
    )


def _due(mode: str, deps: Collection[dg.AssetKey], ignored: Collection[dg.AssetKey]) -> Condition:
    """True from a change of the code or an input until the output is requested or made from it.

    A run did not use the new content if an input changed during the run, which a tag of the run
    records (`nmoe_assets.inputs`), or between the run and the next tick.
    """
    reason = changed = _any_changed(deps)
    if mode == "make":
        # At the first evaluation, and if someone wipes the output. A missing output is also
        # requested when its inputs are made, since these inputs then have new content.
        reason |= _AC.newly_missing()
    made = _AC.newly_updated() & ~_outdated(ignored)
    # A requested run may start before a change of an input in the same tick, so it does not count.
    requested = _AC.newly_requested() & ~changed
    return reason.since(requested | made)


def automation_sensor(run: Run) -> dg.AutomationConditionSensorDefinition:
    """The sensor that evaluates the conditions of all assets of the mixture."""
    prefix = run.config.automation.prefix
    target = dg.AssetSelection.key_prefixes([prefix]) if prefix else dg.AssetSelection.all()
    return dg.AutomationConditionSensorDefinition(
        prefixed(run, "follow_changes"),
        target=target,
        default_status=sensor_status(run),
        minimum_interval_seconds=run.config.automation.poll_interval_s,
        description="Requests assets whose inputs or settings changed, as `[automation]` allows.",
    )


def sensor_status(run: Run) -> dg.DefaultSensorStatus:
    """Whether sensors of this run start with the daemon."""
    starts = run.config.automation.starts
    return dg.DefaultSensorStatus.RUNNING if starts else dg.DefaultSensorStatus.STOPPED
