"""Stages and phases of a plan whose sources are buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from loader.plan.mixture import Stage, StageSource, temper
from loader.plan.phases import Phase

Sizes = Mapping[str, Mapping[str, int]]
"""Tokens of each bucket, by source and by the bucket's name in the plan, such as `web/q3`."""


def bucket_stages(stages: Sequence[Stage], sizes: Sizes) -> tuple[Stage, ...]:
    """Stages with the buckets of each source in its place: a bucket has the share of the source's
    weight that it has of the source's tokens, before temperature, and the source's `max_epochs`."""
    return tuple(_bucket_stage(stage, sizes) for stage in stages)


def _bucket_stage(stage: Stage, sizes: Sizes) -> Stage:
    listed: list[StageSource] = []
    for source in stage.sources:
        for name, weight in _divided(source.name, source.untempered, sizes):
            listed.append(replace(source, name=name, weight=weight, listed=weight))
    weights = temper([source.weight for source in listed], stage.temperature)
    is_tempered = stage.temperature != 1
    sources = tuple(
        replace(source, weight=weight, listed=source.weight if is_tempered else None)
        for source, weight in zip(listed, weights)
    )
    return replace(stage, sources=sources)


def bucket_phases(phases: Sequence[Phase], sizes: Sizes) -> tuple[Phase, ...]:
    """Phases in which a source's weight is divided among its buckets, as in stages; a phase may
    also name a bucket, whose weight then holds."""
    found = []
    for phase in phases:
        weights = {}
        for name, weight in phase.weights.items():
            weights |= dict(_divided(name, weight, sizes))
        own = {name: w for name, w in phase.weights.items() if name not in sizes}
        found.append(replace(phase, weights=weights | own))
    return tuple(found)


def source_phases(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """Phases with the weights of buckets added up to weights of their sources, for a run whose
    buckets are not made yet."""
    found = []
    for phase in phases:
        weights: dict[str, float] = {}
        for name, weight in phase.weights.items():
            source = name.partition("/")[0]
            weights[source] = weights.get(source, 0.0) + weight
        found.append(replace(phase, weights=weights))
    return tuple(found)


def _divided(name: str, weight: float, sizes: Sizes) -> Iterable[tuple[str, float]]:
    """Each bucket of a source with its part of the weight; the source itself if it is none."""
    buckets = sizes.get(name)
    if not buckets:
        return [(name, weight)]
    total = sum(buckets.values())
    return [(bucket, weight * count / total) for bucket, count in buckets.items()]
