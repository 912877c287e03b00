"""Ranges of a plan's values: what was found, what is allowed, and whether it is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields

from loader.order.policies import weight_unit
from loader.plan.records import LoaderPlan, PlanStage
from loader.plan.settings import KEYS, PlanSettings

_MAX_STAGE_SOURCES = 4096


def plan_ranges(plan: LoaderPlan) -> Iterable[tuple[str, str, bool]]:
    """Values of the plan as a whole: found, expected, whether it is so."""
    for name in (f.name for f in fields(PlanSettings)):
        value, key = getattr(plan, name, None), KEYS[name]
        if key.choices:
            yield f"{name} = {value!r}", f"one of {', '.join(key.choices)}", value in key.choices
        elif type(value) is int:
            low = int(key.positive)
            high = plan.vocab_size - 1 if key.high is None else key.high
            yield f"{name} = {value}", f"{low} to {high}", low <= value <= high
    yield (
        "policy = 'least_consumed' with packing = 'best_fit'",
        "packing = 'concat' or another policy: rows of best_fit hold different numbers of tokens",
        (plan.policy, plan.packing) != ("least_consumed", "best_fit"),
    )
    yield "no stage", "at least one", len(plan.stages) > 0
    yield "a stage name twice", "each once", _are_unique(s.name for s in plan.stages)
    yield "a valid source twice", "each once", _are_unique(s.name for s in plan.valid)
    yield (
        f"{plan.num_sequences} sequences",
        f"at least one step of batch_size = {plan.batch_size}",
        plan.num_sequences >= plan.batch_size,
    )
    yield (
        f"{plan.num_sequences} sequences of {plan.seq_len} tokens",
        "at most 2^62 tokens",
        plan.num_sequences * plan.stride < 2**62,
    )


def stage_ranges(stage: PlanStage, policy: str) -> Iterable[tuple[str, str, bool]]:
    """Values of one stage: found, expected, whether it is so."""
    yield "a source name twice", "each once", _are_unique(s.name for s in stage.sources)
    found = f"{len(stage.sources)} sources"
    yield found, f"at most {_MAX_STAGE_SOURCES}", len(stage.sources) <= _MAX_STAGE_SOURCES
    total = sum(source.weight for source in stage.sources)
    # A table of swrr holds one entry per part; rounding up tiny weights may add a little.
    most = 2 * weight_unit(policy)
    yield f"weights that sum to {total}", f"at most {most}", total <= most
    scale = stage.lr_scale
    yield f"lr_scale = {scale}", "a finite number above 0", 0 < scale < math.inf
    yield f"start_step = {stage.start_step}", "at least 0", stage.start_step >= 0
    for source in stage.sources:
        found = f"source {source.name!r} with weight {source.weight}"
        yield found, "a weight of at least 1", source.weight >= 1
        found = f"source {source.name!r} with quota {source.quota_sequences}"
        yield found, "a quota of at least 0", source.quota_sequences >= 0
    yield "no sequence", "at least one", stage.num_sequences > 0


def _are_unique(names: Iterable[str]) -> bool:
    listed = list(names)
    return len(listed) == len(set(listed))
