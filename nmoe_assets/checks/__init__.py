"""The checks of assets: `nmoe_core.tasks.checks` finds, this folder tells Dagster."""
