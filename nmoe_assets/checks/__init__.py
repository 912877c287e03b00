"""The checks of assets: `nmoe_core.tasks.checks` computes the verdicts, and this folder reports
them to Dagster."""
