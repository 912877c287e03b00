"""Automation: outputs follow the content of their inputs, never the time a file was written.

`regrade` asks for quality scores when the calibration, a shard's content or the grading code
changed, or a shard has none. New labels, heads or a new backbone reach scores through the
calibration, which names its heads and is made again after them: scores of new heads and an old
calibration would be refused. `FOLLOW` asks the same of everything else, but only where it was made
once: a person starts the first run. Both wait for inputs that are being made, are about to be made,
failed, or did not pass a check that blocks. Dagster says what may be stale; the fingerprints beside
the files decide.
"""

import dagster as dg

from nmoe_assets.assets.inputs import CHANGED_MEANWHILE
from nmoe_assets.assets.names import asset_key, named
from nmoe_core.config.run import Run

_AC = dg.AutomationCondition
# Dagster looks at the newest run of a check: an unfinished or ended one has not passed either.
_blocked = _AC.any_checks_match(~_AC.check_passed(), blocking_only=True)
_inputs_settled = (
    ~_AC.any_deps_missing()
    & ~_AC.any_deps_in_progress()
    & ~_AC.any_deps_match(_AC.will_be_requested()).with_label("an input is about to be made")
    & ~_AC.any_deps_match(_AC.execution_failed()).with_label("an input failed")
    & ~_AC.any_deps_match(_blocked).with_label("an input did not pass")
    & ~_AC.in_progress()
)


def _since_made(
    reason: dg.AutomationCondition, *, unless_of: dg.AssetSelection | None = None
) -> dg.AutomationCondition:
    """True from a reason or new content of an input until the output is requested or made from it.

    A run has not made the output from the new content where an input changed while it was at work,
    which a tag of the run says (`nmoe_assets.assets.inputs`), nor where an input changed after the
    run and before the next tick.

    Args:
        reason: A reason besides the content of inputs.
        unless_of: Inputs whose changes do not trigger anything.
    """
    input_changed = _AC.any_deps_match(_AC.data_version_changed())
    input_made = _AC.any_deps_match(_AC.newly_updated())
    if unless_of is not None:
        input_changed, input_made = (one.ignore(unless_of) for one in (input_changed, input_made))
    changed_meanwhile = _AC.any_new_update_has_run_tags(tag_keys={CHANGED_MEANWHILE})
    # Dagster compares the times of the two where both are new.
    changed_after = input_made.since(_AC.newly_updated())
    made = (
        _AC.newly_updated()
        & ~changed_meanwhile.with_label("an input changed while it was made")
        & ~changed_after.with_label("an input was made after it")
    )
    # A run that is only requested may begin before an input that changed in the same tick.
    requested = _AC.newly_requested() & ~input_changed
    return (reason | input_changed.with_label("an input's content")).since(requested | made)


def regrade(run: Run) -> dg.AutomationCondition:
    """The condition of quality scores."""
    behind_calibration = dg.AssetSelection.assets(
        *(asset_key(run, ["hydra", name]) for name in ("backbone", "probe_head", "judge_head"))
    )
    reason = _AC.newly_missing() | _AC.code_version_changed()
    due = _since_made(reason, unless_of=behind_calibration)
    return (due & _inputs_settled).with_label("regrade")


FOLLOW = (_since_made(_AC.code_version_changed()) & _inputs_settled & ~_AC.missing()).with_label(
    "follow"
)


def automation_sensor(run: Run) -> dg.AutomationConditionSensorDefinition:
    """The sensor that evaluates the conditions of all assets of the mixture."""
    prefix = run.config.automation.prefix
    target = dg.AssetSelection.key_prefixes([prefix]) if prefix else dg.AssetSelection.all()
    return dg.AutomationConditionSensorDefinition(
        named(run, "follow_changes"),
        target=target,
        default_status=sensor_status(run),
        minimum_interval_seconds=run.config.automation.follow_every_s,
        description="Requests scores, curated shards and the plan where content changed.",
    )


def sensor_status(run: Run) -> dg.DefaultSensorStatus:
    """Whether sensors of this run start with the daemon."""
    starts = run.config.automation.starts
    return dg.DefaultSensorStatus.RUNNING if starts else dg.DefaultSensorStatus.STOPPED
