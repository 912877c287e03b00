"""The schedules: the jobs `verify` and `retention`, at the times that the run's TOML names."""

import dagster as dg

from nmoe_assets.names import prefixed
from nmoe_core.base.errors import ConfigError
from nmoe_core.config.run import Run


def schedules(run: Run) -> list[dg.ScheduleDefinition]:
    """`nightly_verify`, and if `[retention] cron` is set, `nightly_retention`. Raises ConfigError
    if a cron expression or the time zone is invalid."""
    cron = run.config.automation.verify_cron
    text = "Reads the files of every manifest again and reports changed files."
    made = [_schedule(run, "verify", "[automation] verify_cron", cron, text)]
    table = run.config.retention
    if table.cron:
        text = f"Deletes runs older than {table.keep_days} days that no asset depends on."
        made.append(_schedule(run, "retention", "[retention] cron", table.cron, text))
    return made


def _schedule(run: Run, job: str, key: str, cron: str, text: str) -> dg.ScheduleDefinition:
    status = dg.DefaultScheduleStatus
    zone = run.config.automation.verify_timezone
    try:
        return dg.ScheduleDefinition(
            name=prefixed(run, f"nightly_{job}"),
            job_name=prefixed(run, job),
            cron_schedule=cron,
            execution_timezone=zone,
            default_status=status.RUNNING if run.config.automation.starts else status.STOPPED,
            description=text,
        )
    except dg.DagsterInvalidDefinitionError as error:
        is_zone = zone in str(error)
        raise ConfigError(
            "the time zone is unknown" if is_zone else "the cron expression is invalid",
            where=run.path,
            found=f"[automation] verify_timezone = {zone!r}" if is_zone else f"{key} = {cron!r}",
            expected="a name such as Europe/Berlin" if is_zone else "five fields: '0 3 * * *'",
            do="correct the value, or remove the key: then it is UTC"
            if is_zone
            else "correct the value: minute, hour, day of the month, month, day of the week",
        ) from error
