"""Prep from Python; the two published names of the pipeline mean the same class."""

from nmoe_core.prep.pipeline import ParallelPrepPipeline, PrepConfig, PrepPipeline

__all__ = ["ParallelPrepPipeline", "PrepConfig", "PrepPipeline"]
