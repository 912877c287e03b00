"""Reports the verdicts of `nmoe_core.tasks.checks` to Dagster."""
