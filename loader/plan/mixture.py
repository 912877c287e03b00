"""Mixtures and flow profiles: the sources and the number of tokens of each stage.

A mixture lists the sources of a stage; a flow sets the length of each stage and the temperature of
its weights. All arithmetic on budgets and quotas is exact (decimal fractions). Only `id`,
`tokens_b` and `max_epochs` of a source are read here; prep reads the other keys. Formats:
docs/formats.md.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from loader.errors import ConfigError
from loader.plan import tables

_STAGES = ("pretrain", "mid", "long")
_BUDGETS = ("tokens_b", "tokens_b_ratio", "scale")
_MIXTURE_KEYS = ("total_tokens_b", "sample_temperature", "sources", "description")
_FLOW_KEYS = (
    *("mode", "stages", "tokens_b_override", "sample_temperature", "mixture", "description"),
    *_BUDGETS,
)


@dataclass(frozen=True, slots=True)
class StageSource:
    """A source of a stage and its relative weight after temperature; weights need not sum to 1.
    `listed` is the weight before temperature, if it differs. `max_epochs` is the maximum number of
    passes over the source in all stages together; 0 if the run's setting applies."""

    name: str
    weight: float
    listed: float | None = None
    max_epochs: int = 0

    @property
    def untempered(self) -> float:
        """The weight before temperature."""
        return self.weight if self.listed is None else self.listed


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of training with one set of weights and `num_tokens` tokens. If `num_tokens` is 0,
    every source is read to its end, in as many epochs as the plan allows."""

    name: str
    mixture: str
    num_tokens: int
    sources: tuple[StageSource, ...]
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class _Mixture:
    """A `[mixtures.<name>]` table. The weight of a source is its size in 10^9 tokens."""

    name: str
    total_tokens_b: float
    sample_temperature: float
    sources: tuple[StageSource, ...]


@dataclass(frozen=True, slots=True)
class _Flow:
    """A `[flow.<name>]` table. mixture: name of the mixture, by stage. numbers: the budget, and the
    temperature. override: 10^9 tokens, by stage."""

    mixture: dict[str, str]
    numbers: dict[str, float]
    override: dict[str, float]


def resolve_stages(
    mixture_toml: str | Path,
    flow_profiles_toml: str | Path,
    flow_mode: str,
    active_params_b: float | None = None,
) -> tuple[Stage, ...]:
    """The stages of a flow in the order pretrain, mid, long.

    A stage's budget is its `tokens_b_override`, else its mixture's `total_tokens_b` times the
    flow's scale, and the scale is chosen so that all stages together have `tokens_b` (or
    `tokens_b_ratio` x `active_params_b`) billion tokens. Budgets are rounded down to whole tokens.
    Raises ConfigError if a file, a key or a value is wrong, a name is unknown, an id appears twice
    in a mixture, or `active_params_b` is missing.
    """
    flow_tables = _named(flow_profiles_toml, "flow")
    mixture_tables = _named(mixture_toml, "mixtures")
    mixtures = {name: _read_mixture(name, *row) for name, row in mixture_tables.items()}
    flows = {name: _read_flow(*row) for name, row in flow_tables.items()}
    if flow_mode not in flows:
        raise tables.unknown_name("flow", str(flow_mode), flows, flow_profiles_toml)
    flow = flows[flow_mode]
    where = f"{flow_profiles_toml}: flow.{flow_mode}"
    for mixture in flow.mixture.values():
        if mixture not in mixtures:
            raise tables.unknown_name("mixture", mixture, mixtures, mixture_toml)
    parts = {name: mixtures[flow.mixture[name]] for name in _STAGES if name in flow.mixture}
    scale = _scale(flow, parts.values(), active_params_b, where)
    return tuple(_stage(flow, name, mixture, scale, where) for name, mixture in parts.items())


def temper(weights: Sequence[float], temperature: float) -> list[float]:
    """Weights to the power 1/T, scaled so that the largest is 1; zero stays zero, and T = 1 changes
    nothing. Raises ConfigError if a positive weight would become zero."""
    if temperature == 1:
        return list(weights)
    largest = max(weights)
    tempered = [(w / largest) ** (1 / temperature) if w else 0.0 for w in weights]
    for before, after in zip(weights, tempered):
        if before and after < 1e-300:
            raise ConfigError(
                "sample_temperature turns a positive weight into zero",
                found=f"temperature {temperature} on weight {before} of {largest}",
                do="raise the temperature, or give the source weight 0",
            )
    return tempered


def weights_fixed_point(weights: Sequence[float], one: int = 1_000_000) -> list[int]:
    """Weights as integers in units of their sum divided by `one`; at least 1 for a positive
    weight."""
    exact = [_exact(w) for w in weights]
    total = sum(exact)
    return [max(1, round(w / total * one)) if w else 0 for w in exact]


def quotas(
    num_sequences: int, weights: Sequence[float], owed: Sequence[Fraction] = ()
) -> list[int]:
    """Divide `num_sequences` by weight, by largest remainder; ties go to the earlier source.

    The result sums to `num_sequences` exactly; a source of weight zero gets no sequence. owed:
    sequences that each source gets in addition to its share; below 0 if the source got too many
    before. If owed plus share is below 0, the source gets no sequence.
    """
    exact = [_exact(w) for w in weights]
    beside = [*owed] or [Fraction(0)] * len(weights)
    while True:
        total = sum(exact)
        rest = num_sequences - sum(beside)
        ideal = [rest * w / total + own for w, own in zip(exact, beside)]
        if min(ideal) >= 0:
            break
        ahead = [share < 0 for share in ideal]
        exact = [Fraction(0) if out else w for w, out in zip(exact, ahead)]
        beside = [Fraction(0) if out else own for own, out in zip(beside, ahead)]
    shares = [math.floor(share) for share in ideal]
    by_remainder = sorted(range(len(ideal)), key=lambda i: (shares[i] - ideal[i], i))
    for i in by_remainder[: num_sequences - sum(shares)]:
        shares[i] += 1
    return shares


def _exact(value: float) -> Fraction:
    # The decimal number in the file, not its binary approximation: 0.1 is exactly one tenth.
    return Fraction(repr(float(value)) if isinstance(value, float) else value)


def _scale(
    flow: _Flow, mixtures: Iterable[_Mixture], active_params_b: float | None, where: str
) -> Fraction:
    budget = flow.numbers
    if "tokens_b_ratio" in budget:
        if active_params_b is None:
            raise ConfigError(
                "active_params_b is missing",
                where=where,
                found=f"tokens_b_ratio = {budget['tokens_b_ratio']}",
                do="set active_params_b, the model's active parameters in 10^9",
            )
        active = tables.number(active_params_b, f"{where}: active_params_b", positive=True)
        total_b = _exact(budget["tokens_b_ratio"]) * _exact(float(active))
    elif "tokens_b" in budget:
        total_b = _exact(budget["tokens_b"])
    else:
        return _exact(budget.get("scale", 1))
    return total_b / sum(_exact(mixture.total_tokens_b) for mixture in mixtures)


def _stage(flow: _Flow, name: str, mixture: _Mixture, scale: Fraction, where: str) -> Stage:
    override = flow.override.get(name)
    tokens_b = _exact(mixture.total_tokens_b) * scale if override is None else _exact(override)
    num_tokens = math.floor(tokens_b * 10**9)
    if num_tokens < 1:
        raise ConfigError("stage has no tokens", where=f"{where}, stage {name}", found=num_tokens)
    temperature = flow.numbers.get("sample_temperature", mixture.sample_temperature)
    tempered = temper([source.weight for source in mixture.sources], temperature)
    sources = tuple(
        replace(source, weight=weight, listed=None if temperature == 1 else source.weight)
        for source, weight in zip(mixture.sources, tempered)
    )
    return Stage(name, mixture.name, num_tokens, sources, temperature)


def _named(path: str | Path, key: str) -> dict[str, tuple[dict[str, Any], str]]:
    """The tables below `key` by name, each with its location for messages."""
    found = tables.table(tables.read_toml(path).get(key, {}), f"{path}: {key}")
    placed = ((name, value, f"{path}: {key}.{name}") for name, value in found.items())
    return {name: (tables.table(value, place), place) for name, value, place in placed}


def _read_mixture(name: str, table: dict[str, Any], where: str) -> _Mixture:
    tables.refuse_unknown(table, _MIXTURE_KEYS, where)
    rows = table.get("sources")
    if not isinstance(rows, list) or not rows:
        raise ConfigError("a mixture needs sources", where=where, expected="[[...sources]]")
    sources: dict[str, StageSource] = {}
    for i, row in enumerate(rows):
        source = _read_source(row, f"{where}.sources[{i}]")
        if source.name in sources:
            raise ConfigError("a source id appears twice", where=where, found=repr(source.name))
        sources[source.name] = source
    total_b = sum(source.weight for source in sources.values())
    if not total_b:
        raise ConfigError("all weights are zero", where=where, expected="a tokens_b above 0")
    given = {"total_tokens_b": total_b, "sample_temperature": 1.0} | table
    numbers = _numbers(given, ("total_tokens_b", "sample_temperature"), where)
    return _Mixture(name, **numbers, sources=tuple(sources.values()))


def max_epochs(source: Mapping[str, Any], where: str) -> int:
    """The `max_epochs` of a source's table; 0 if it sets none. Raises ConfigError."""
    return int(tables.number(source.get("max_epochs", 0), f"{where}.max_epochs", whole=True))


def _read_source(value: Any, where: str) -> StageSource:
    table = tables.table(value, where)
    for key in ("id", "tokens_b"):
        if key not in table:
            raise ConfigError(
                f"{key} is missing",
                where=where,
                found=f"keys {', '.join(sorted(table)) or '(none)'}",
                do=f"did you mean {tables.nearest(key, table)!r}?" if table else None,
            )
    source_id = tables.text(table["id"], f"{where}.id")
    # An id is the name of a directory and the first part of every document id.
    if source_id.startswith(".") or any(c in '/\\#"' or ord(c) < 32 for c in source_id):
        raise ConfigError(
            "source id cannot name a directory",
            where=f"{where}.id",
            found=repr(source_id),
            expected="no slash, '#', quote or control character, and no leading dot",
        )
    weight = tables.number(table["tokens_b"], f"{where}.tokens_b")
    return StageSource(source_id, weight, max_epochs=max_epochs(table, where))


def _read_flow(table: dict[str, Any], where: str) -> _Flow:
    tables.refuse_unknown(table, _FLOW_KEYS, where)
    stages = tables.table(table.get("mixture"), f"{where}.mixture")
    if not stages:
        raise ConfigError("a flow needs at least one stage", where=f"{where}.mixture")
    tables.refuse_unknown(stages, _STAGES, f"{where}.mixture")
    listed = table.get("stages", list(stages))
    if not isinstance(listed, list) or sorted(map(str, listed)) != sorted(stages):
        raise ConfigError(
            "stages and the mixture table disagree",
            where=where,
            found=f"stages = {listed!r}",
            expected=f"the keys of its mixture table: {sorted(stages)}",
        )
    place = f"{where}.tokens_b_override"
    override = tables.table(table.get("tokens_b_override", {}), place)
    tables.refuse_unknown(override, tuple(stages), place)
    given = [key for key in _BUDGETS if key in table]
    if len(given) > 1:
        raise ConfigError("more than one budget", where=where, found=" and ".join(given))
    return _Flow(
        {k: tables.text(v, f"{where}.mixture.{k}") for k, v in stages.items()},
        _numbers(table, (*given, "sample_temperature"), where),
        _numbers(override, override, place),
    )


def _numbers(table: Mapping[str, Any], keys: Iterable[str], where: str) -> dict[str, float]:
    """The keys among `keys` that are set; each must be a number above 0."""
    given = (key for key in keys if key in table)
    return {key: tables.number(table[key], f"{where}.{key}", positive=True) for key in given}
