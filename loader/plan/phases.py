"""Phases: changes of the weights and of the learning rate's scale, from a given step.

A phase starts exactly with the first sequence of its step, and ends at the next phase. Phases
become stages of the plan, so the stream stays a function of the position. Table layout:
KempnerForge's `[[data.phases]]`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from loader.errors import ConfigError
from loader.plan import tables
from loader.plan.mixture import Stage, temper

_INHERIT = ("original", "zero")
_KEYS = ("start_step", "dataset_weights", "lr_scale", "inherit")
_OF_ALL_STEPS = ("seq_len", "batch_size")
_SUGAR_KEYS = ("anneal_start_step", "anneal_weights")


@dataclass(frozen=True, slots=True)
class Phase:
    """Weights and learning-rate scale from a step. weights: weights of the listed sources, before
    temperature. inherit: the weights of all sources that are not listed: `original` or `zero`."""

    start_step: int
    weights: Mapping[str, float]
    lr_scale: float = 1.0
    inherit: str = "original"


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a stage between two phase starts."""

    stage: Stage
    num_sequences: int
    start_step: int
    lr_scale: float


def read_phases(config: Mapping[str, Any], where: str) -> tuple[Phase, ...]:
    """The phases of a run's settings: `phases`, or the two `anneal_` keys. Raises ConfigError if
    both forms are given, only one `anneal_` key is given, start steps are not ascending, a
    learning-rate scale is not above 0, or a weight is not a number of at least 0."""
    sugar = {key: config[key] for key in _SUGAR_KEYS if key in config}
    first = next((f"{key} = {value!r}" for key, value in sugar.items()), "")
    if sugar and config.get("phases"):
        raise ConfigError(
            "phases and the `anneal_` keys are both given",
            where=where,
            found=f"phases and {first}",
            do="remove the `anneal_` keys, and add the annealing as the last phase",
        )
    if len(sugar) == 1:
        missing = next(key for key in _SUGAR_KEYS if key not in sugar)
        raise ConfigError(f"{missing} is missing", where=where, found=first)
    rows = config.get("phases", [])
    places = [where]
    if sugar:
        rows = [dict(zip(("start_step", "dataset_weights"), sugar.values()))]
    elif not isinstance(rows, list | tuple):
        place = f"{where}: phases"
        found = type(rows).__name__
        raise ConfigError("not a list of tables", where=place, found=found)
    else:
        places = [f"{where}: phases[{i}]" for i in range(len(rows))]
    phases = tuple(_read_phase(row, place) for row, place in zip(rows, places))
    for earlier, later, place in zip(phases, phases[1:], places[1:]):
        if later.start_step <= earlier.start_step:
            raise ConfigError(
                "phases are not in order",
                where=f"{place}: start_step",
                found=later.start_step,
                expected=f"above {earlier.start_step}, the start of the phase before it",
            )
    return phases


def check_names(phases: Sequence[Phase], names: Collection[str], where: object) -> None:
    """Raise ConfigError if a phase names a source that the run does not have."""
    for phase in phases:
        for name in phase.weights:
            if name not in names:
                place = f"{where}: phase of step {phase.start_step}"
                raise tables.unknown_name("source", name, names, place)


def cut_stage(
    stage: Stage, first: int, num_sequences: int, phases: Sequence[Phase], batch_size: int
) -> list[Segment]:
    """Split a stage, sequences `[first, first + num_sequences)` of the run, at the starts of
    phases. Raises ConfigError if a phase sets all weights of the stage to zero."""
    stop = first + num_sequences
    # The phase of each part, by the start of the part.
    held: dict[int, Phase | None] = {first: None}
    for phase in phases:
        start = phase.start_step * batch_size
        if start < stop:
            held[max(start, first)] = phase
    segments = []
    for (start, phase), end in zip(held.items(), [*held, stop][1:]):
        if phase is None:
            segments.append(Segment(stage, end - start, 0, 1.0))
            continue
        weighed = _weighed(stage, phase, start > first)
        step = phase.start_step
        begins_here = step if step * batch_size == start else 0
        segments.append(Segment(weighed, end - start, begins_here, phase.lr_scale))
    return segments


def _weighed(stage: Stage, phase: Phase, is_later_part: bool) -> Stage:
    listed = [
        phase.weights.get(source.name, source.untempered if phase.inherit == "original" else 0.0)
        for source in stage.sources
    ]
    if not any(listed):
        raise ConfigError(
            "a phase sets all weights of a stage to zero",
            where=f"phase of step {phase.start_step}",
            found=f"stage {stage.name!r}",
            expected="a weight above 0 for one of its sources",
        )
    weights = temper(listed, stage.temperature)
    sources = tuple(
        replace(source, weight=weight, listed=before)
        for source, weight, before in zip(stage.sources, weights, listed)
    )
    name = f"{stage.name}@{phase.start_step}" if is_later_part else stage.name
    return Stage(name, stage.mixture, stage.num_tokens, sources, stage.temperature)


def _read_phase(value: Any, where: str) -> Phase:
    table = tables.table(value, where)
    for key in _OF_ALL_STEPS:
        if key in table:
            raise ConfigError(
                "a plan has one shape of batches, which a phase cannot change",
                where=f"{where}.{key}",
                found=repr(table[key]),
                do="end this plan here, and go on from its counts in another plan:"
                ' load_state_dict({"datasets": state["datasets"]})',
            )
    tables.refuse_unknown(table, _KEYS, where)
    if "start_step" not in table:
        raise ConfigError("start_step is missing", where=where)
    if not {"dataset_weights", "lr_scale"} & table.keys():
        raise ConfigError(
            "the phase changes nothing", where=where, do="set dataset_weights or lr_scale"
        )
    inherit = table.get("inherit", "original")
    if inherit not in _INHERIT:
        raise tables.unknown_name("inherit", str(inherit), _INHERIT, where)
    weights = tables.table(table.get("dataset_weights", {}), f"{where}: dataset_weights")
    lr_scale = tables.number(table.get("lr_scale", 1.0), f"{where}: lr_scale", positive=True)
    return Phase(
        start_step=int(tables.number(table["start_step"], f"{where}: start_step", whole=True)),
        weights={
            str(name): tables.number(weight, f"{where}: dataset_weights.{name}")
            for name, weight in weights.items()
        },
        lr_scale=float(lr_scale),
        inherit=inherit,
    )
