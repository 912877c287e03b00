"""Dagster definitions: assets, checks and jobs over `nmoe_core.stages`, and nothing else."""
