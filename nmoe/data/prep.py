"""Prep from Python; both pipelines are one."""

from nmoe_core.prep.pipeline import ParallelPrepPipeline, PrepConfig, PrepPipeline

__all__ = ["ParallelPrepPipeline", "PrepConfig", "PrepPipeline"]
