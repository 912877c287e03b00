"""Automation: outputs follow the content of their inputs, never the times of files.

An asset is due when its code version or the content of an input changed, and, if `[automation]`
says `make` for its kind, also when it was missing at the first evaluation. It waits for an input
that is missing, due itself, being made, about to be made, or has not passed a blocking check. An
input that you make by hand may stay due for ever, so it is used as it is unless its last run
failed. Assets that read shards wait while a blocking check of the manifest has failed, such as the
checksums. Scores do not follow heads and backbone directly, only the calibration, which names them:
scores of new heads under an old calibration would be refused. Dagster proposes assets that may be
stale; the fingerprints beside the files decide.
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

# The manifest whose checks read the bytes of each of these assets.
_CHECKED_BY = {
    "shards": "manifest",
    "valid_shards": "valid_manifest",
    "curated": "curated_manifest",
}
Condition = dg.AutomationCondition[Any]  # of an asset or of a check
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
# Dagster looks at the newest execution of a check: one that is unfinished, or ended without a
# verdict, has not passed.
_unusable = (
    _AC.missing() | _in_progress | _AC.any_checks_match(~_AC.check_passed(), blocking_only=True)
)
_damaged = _AC.any_checks_match(_AC.check_failed(), blocking_only=True)


def automation(run: Run, key: Sequence[str], inputs: Collection[dg.AssetDep]) -> Condition | None:
    """The condition that requests the asset of a key (without the mixture's prefix); None for
    never.

    A tick evaluates every node of every condition for every input, so no node here repeats what
    another one implies. `asset_matches` is cheaper than `any_deps_match`, with which Dagster
    evaluates one input after the other and reads the status of each separately.
    """
    mode = _mode(run, key[-1])
    if mode == "off":
        return None
    holds_up = _in_progress if mode == "make" else _in_progress | _AC.missing()
    unread = _unread(run, asset_key(run, key))
    deps = {one.asset_key: one.partition_mapping for one in inputs}
    for dep, mapping in deps.items():
        is_followed = _mode(run, dep.path[-1]) != "off"
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
    """True for an input that cannot be used, or will be made; `ignored` as in `_due_input`."""
    return _unusable | _AC.will_be_requested() | _due_input(ignored)


@functools.cache
def _due_input(ignored: tuple[dg.AssetKey, ...]) -> Condition:
    """True for an input until it is made from its changed inputs, except the `ignored` ones. A
    request does not end it, since it may not lead to a run; nor does a run that is seen together
    with new code, since it may have used the old code."""
    changed = _code_changed | _any_deps(_AC.data_version_changed(), ignored)
    return _code_changed | changed.since(_AC.newly_updated())


@functools.cache
def _not_made(ignored: tuple[dg.AssetKey, ...]) -> Condition:
    """True for an input that is new and will be made again. `_not_ready` does not notice this if
    all partitions of the input are read: Dagster never reports such an input as about to be
    requested, since no run makes it together with the assets that read it."""
    return _AC.newly_updated() & _outdated(ignored)


def _of_other_documents(run: Run) -> Condition:
    """True for labels until they are made from the current documents: heads and thresholds would
    refuse them, and you start labelling by hand, since it may cost money."""
    shards = (asset_key(run, (source.name, "shards")) for source in run_sources(run))
    changed = (_AC.asset_matches(key, _AC.data_version_changed()) for key in shards)
    waits = functools.reduce(or_, changed).since(_AC.newly_updated())
    return waits.with_label("labels belong to other documents")


def _any_changed(deps: Collection[dg.AssetKey]) -> Condition:
    """True if the code of the asset or the content of one of these inputs is new."""
    inputs = (_AC.asset_matches(dep, _AC.data_version_changed()) for dep in deps)
    return functools.reduce(or_, inputs, _code_changed)


def _mode(run: Run, name: str) -> str:
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
    # If both are new, Dagster compares their times.
    after = _any_deps(_AC.newly_updated(), ignored).since(_AC.newly_updated())
    return (
        meanwhile.with_label("an input changed while it was made")
        | after.with_label("an input was made after it")
        | _code_changed
    )


def _due(mode: str, deps: Collection[dg.AssetKey], ignored: Collection[dg.AssetKey]) -> Condition:
    """True from new code or new content of an input until the output is requested or made from it.

    A run has not used the new content if an input changed during the run, which a tag of the run
    records (`nmoe_assets.inputs`), or after the run and before the next tick.
    """
    reason = changed = _any_changed(deps)
    if mode == "make":
        # Later, a missing output is requested when its inputs are made, which is new content.
        reason |= _AC.initial_evaluation() & _AC.missing()
    made = _AC.newly_updated() & ~_outdated(ignored)
    # A run that is only requested may begin before an input that changed in the same tick.
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
