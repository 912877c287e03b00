"""Automation: outputs follow the content of their inputs, never the time a file was written.

`REGRADE` asks for quality scores when the calibration, a shard's content or the grading code
changed, or a shard has none. New labels, heads or a new backbone reach scores through the
calibration, which names its heads and is made again after them: scores of new heads and an old
calibration would be refused. `FOLLOW` asks the same of everything else, but only where it was made
once: the first run is a person's. Both wait for inputs that are being made, are about to be, or
failed. Dagster says what may be stale; fingerprints beside the files say what is.
"""

import dagster as dg

from nmoe_core.config import Run

_AC = dg.AutomationCondition
_input_changed = _AC.any_deps_match(_AC.data_version_changed()).with_label("an input's content")
_inputs_settled = (
    ~_AC.any_deps_missing()
    & ~_AC.any_deps_in_progress()
    & ~_AC.any_deps_match(_AC.will_be_requested()).with_label("an input is about to be made")
    & ~_AC.any_deps_match(_AC.execution_failed()).with_label("an input failed")
    & ~_AC.in_progress()
)
_handled = _AC.newly_requested() | _AC.newly_updated()

_BEHIND_CALIBRATION = dg.AssetSelection.assets(
    *(["hydra", name] for name in ("backbone", "probe_head", "judge_head"))
)
_regrade_input_changed = _AC.any_deps_match(_AC.data_version_changed()).ignore(_BEHIND_CALIBRATION)
REGRADE = (
    (_AC.newly_missing() | _AC.code_version_changed() | _regrade_input_changed).since(_handled)
    & _inputs_settled
).with_label("regrade")
FOLLOW = (
    (_AC.code_version_changed() | _input_changed).since(_handled) & _inputs_settled & ~_AC.missing()
).with_label("follow")


def automation_sensor(run: Run) -> dg.AutomationConditionSensorDefinition:
    """The sensor that evaluates the conditions of all assets."""
    return dg.AutomationConditionSensorDefinition(
        "follow_changes",
        target=dg.AssetSelection.all(),
        default_status=sensor_status(run),
        minimum_interval_seconds=run.config.automation.follow_every_s,
        description="Requests scores, curated shards and the plan where content changed.",
    )


def sensor_status(run: Run) -> dg.DefaultSensorStatus:
    """Whether sensors of this run start with the daemon."""
    starts = run.config.automation.starts
    return dg.DefaultSensorStatus.RUNNING if starts else dg.DefaultSensorStatus.STOPPED
