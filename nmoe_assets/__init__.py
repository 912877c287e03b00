"""Dagster definitions: assets, checks and jobs over `nmoe_core.tasks`, and nothing else."""
