"""Mixture and flow profiles: which sources, in which stages, for how many tokens.

A mixture says what a stage is made of, a flow says how long each stage is and at which temperature
its weights are read. `resolve_stages` joins the two; `quotas` turns a stage's weights into whole
sequences. All arithmetic on budgets and quotas is exact (decimal fractions), so a budget never
loses a token to rounding. Only `id` and `tokens_b` of a source are read here; other source keys
belong to prep and are handed on in `settings`. Formats: docs/formats.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from loader.errors import ConfigError
from loader.plan import tables

STAGE_ORDER = ("pretrain", "mid", "long")
FIXED_POINT_ONE = 1_000_000
_MIXTURE_KEYS = ("total_tokens_b", "sample_temperature", "sources", "description")
_FLOW_KEYS = (
    "mode",
    "stages",
    "tokens_b",
    "tokens_b_ratio",
    "scale",
    "tokens_b_override",
    "sample_temperature",
    "mixture",
    "description",
)


@dataclass(frozen=True, slots=True)
class MixtureSource:
    """One source of a mixture: its size in 10^9 tokens is its weight."""

    id: str
    tokens_b: float
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mixture:
    """One `[mixtures.<name>]` table."""

    name: str
    total_tokens_b: float
    sample_temperature: float
    sources: tuple[MixtureSource, ...]


@dataclass(frozen=True, slots=True)
class Flow:
    """One `[flow.<name>]` table. At most one of `tokens_b`, `tokens_b_ratio`, `scale` is set."""

    name: str
    mixture: dict[str, str]
    tokens_b: float | None = None
    tokens_b_ratio: float | None = None
    scale: float | None = None
    tokens_b_override: dict[str, float] = field(default_factory=dict)
    sample_temperature: float | None = None


@dataclass(frozen=True, slots=True)
class StageSource:
    """A source of a stage and its relative weight, temperature applied; weights need not sum.
    `listed` is the weight before temperature, where it differs."""

    name: str
    weight: float
    listed: float | None = None

    @property
    def untempered(self) -> float:
        """The weight before temperature."""
        return self.weight if self.listed is None else self.listed


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of training with one set of weights, `num_tokens` long. `num_tokens` 0 reads every
    source to its end, as far as the plan's epochs allow."""

    name: str
    mixture: str
    num_tokens: int
    sources: tuple[StageSource, ...]
    temperature: float = 1.0


def read_mixtures(path: str | Path) -> dict[str, Mixture]:
    """All mixtures of a mixture TOML by name.

    Raises:
        ConfigError: The file, a key or a value is wrong; an id appears twice in one mixture.
    """
    found = tables.table(tables.read_toml(path).get("mixtures", {}), f"{path}: mixtures")
    return {name: _read_mixture(name, table, path) for name, table in found.items()}


def read_flows(path: str | Path) -> dict[str, Flow]:
    """All flows of a flow profiles TOML by name.

    Raises:
        ConfigError: The file, a key or a value is wrong, or a flow names a stage that is not one.
    """
    found = tables.table(tables.read_toml(path).get("flow", {}), f"{path}: flow")
    return {name: _read_flow(name, table, path) for name, table in found.items()}


def resolve_stages(
    mixture_toml: str | Path,
    flow_profiles_toml: str | Path,
    flow_mode: str,
    active_params_b: float | None = None,
) -> tuple[Stage, ...]:
    """The stages of a flow in the order pretrain, mid, long.

    A stage's budget is its `tokens_b_override`, else its mixture's `total_tokens_b` times the
    flow's scale, where `tokens_b` (or `tokens_b_ratio` x `active_params_b`) sets the scale so that
    all stages together have that many tokens. Budgets are rounded down to whole tokens.

    Raises:
        ConfigError: A name is not known, a value is wrong, or `active_params_b` is needed.
    """
    flows, mixtures = read_flows(flow_profiles_toml), read_mixtures(mixture_toml)
    if flow_mode not in flows:
        raise tables.unknown_name("flow", str(flow_mode), flows, flow_profiles_toml)
    flow = flows[flow_mode]
    where = f"{flow_profiles_toml}: flow.{flow.name}"
    for mixture in flow.mixture.values():
        if mixture not in mixtures:
            raise tables.unknown_name("mixture", mixture, mixtures, mixture_toml)
    parts = {stage: mixtures[name] for stage, name in flow.mixture.items()}
    scale = _scale(flow, parts, active_params_b, where)
    return tuple(
        _stage(flow, name, parts[name], scale, where) for name in STAGE_ORDER if name in parts
    )


def temper(weights: Sequence[float], temperature: float) -> list[float]:
    """Weights to the power 1/T, scaled so that the largest is 1; zero stays zero, T = 1 as given.

    Source: p ~ w^(1/T), so T > 1 flattens and T < 1 sharpens.

    Raises:
        ConfigError: A positive weight would become zero.
    """
    if temperature == 1:
        return list(weights)
    largest = max(weights)
    tempered = [(w / largest) ** (1 / temperature) if w else 0.0 for w in weights]
    for before, after in zip(weights, tempered):
        if before and after < 1e-300:
            raise ConfigError(
                "sample_temperature makes a positive weight vanish",
                found=f"temperature {temperature} on weight {before} of {largest}",
                do="raise the temperature, or give the source weight 0",
            )
    return tempered


def weights_fixed_point(weights: Sequence[float], one: int = FIXED_POINT_ONE) -> list[int]:
    """Each weight in `one`ths of their sum, at least 1 for a positive weight, 0 for zero."""
    exact = [_exact(w) for w in weights]
    total = sum(exact)
    return [max(1, round(w / total * one)) if w else 0 for w in exact]


def quotas(num_sequences: int, weights: Sequence[float]) -> list[int]:
    """Share `num_sequences` among weights by largest remainder; ties go to the earlier source.

    The result sums to `num_sequences` exactly; a source of weight zero gets none.
    """
    exact = [_exact(w) for w in weights]
    total = sum(exact)
    ideal = [num_sequences * w / total for w in exact]
    shares = [math.floor(share) for share in ideal]
    by_remainder = sorted(range(len(ideal)), key=lambda i: (shares[i] - ideal[i], i))
    for i in by_remainder[: num_sequences - sum(shares)]:
        shares[i] += 1
    return shares


def _exact(value: float) -> Fraction:
    # The decimal that was written, not its binary neighbour: 0.1 is one tenth.
    return Fraction(repr(float(value)) if isinstance(value, float) else value)


def _scale(
    flow: Flow, parts: Mapping[str, Mixture], active_params_b: float | None, where: str
) -> Fraction:
    tokens_b = flow.tokens_b
    if flow.tokens_b_ratio is not None:
        if active_params_b is None:
            raise ConfigError(
                "active_params_b is missing",
                where=where,
                found=f"tokens_b_ratio = {flow.tokens_b_ratio}",
                do="set active_params_b, the model's active parameters in 10^9",
            )
        active = tables.number(active_params_b, f"{where}: active_params_b", positive=True)
        total_b = _exact(flow.tokens_b_ratio) * _exact(float(active))
    elif tokens_b is not None:
        total_b = _exact(tokens_b)
    else:
        return _exact(1 if flow.scale is None else flow.scale)
    return total_b / sum(_exact(mixture.total_tokens_b) for mixture in parts.values())


def _stage(flow: Flow, name: str, mixture: Mixture, scale: Fraction, where: str) -> Stage:
    override = flow.tokens_b_override.get(name)
    tokens_b = _exact(mixture.total_tokens_b) * scale if override is None else _exact(override)
    num_tokens = math.floor(tokens_b * 10**9)
    if num_tokens < 1:
        raise ConfigError("stage has no tokens", where=f"{where}, stage {name}", found=num_tokens)
    temperature = flow.sample_temperature or mixture.sample_temperature
    weights = temper([source.tokens_b for source in mixture.sources], temperature)
    sources = tuple(
        StageSource(s.id, w, None if temperature == 1 else s.tokens_b)
        for s, w in zip(mixture.sources, weights)
    )
    return Stage(name, mixture.name, num_tokens, sources, temperature)


def _read_mixture(name: str, value: Any, path: str | Path) -> Mixture:
    where = f"{path}: mixtures.{name}"
    table = tables.table(value, where)
    tables.refuse_unknown(table, _MIXTURE_KEYS, where)
    rows = table.get("sources")
    if not isinstance(rows, list) or not rows:
        raise ConfigError("a mixture needs sources", where=where, expected="[[...sources]]")
    sources = tuple(_read_source(row, f"{where}.sources[{i}]") for i, row in enumerate(rows))
    ids = [source.id for source in sources]
    for source_id in ids:
        if ids.count(source_id) > 1:
            raise ConfigError("a source id appears twice", where=where, found=repr(source_id))
    total_b = sum(source.tokens_b for source in sources)
    if not total_b:
        raise ConfigError("all weights are zero", where=where, expected="a tokens_b above 0")
    total_b = table.get("total_tokens_b", total_b)
    temperature = table.get("sample_temperature", 1.0)
    return Mixture(
        name=name,
        total_tokens_b=tables.number(total_b, f"{where}.total_tokens_b", positive=True),
        sample_temperature=tables.number(temperature, f"{where}.sample_temperature", positive=True),
        sources=sources,
    )


def _read_source(value: Any, where: str) -> MixtureSource:
    rest = dict(tables.table(value, where))
    for key in ("id", "tokens_b"):
        if key not in rest:
            raise ConfigError(
                f"{key} is missing",
                where=where,
                found=f"keys {', '.join(sorted(rest)) or '(none)'}",
                do=f"nearest key there: {tables.nearest(key, rest)}" if rest else None,
            )
    source_id = tables.text(rest.pop("id"), f"{where}.id")
    # An id names a directory and the first part of every document id.
    if source_id.startswith(".") or any(c in '/\\#"' or ord(c) < 32 for c in source_id):
        raise ConfigError(
            "source id cannot name a directory",
            where=f"{where}.id",
            found=repr(source_id),
            expected="no slash, '#', quote or control character, and no leading dot",
        )
    tokens_b = tables.number(rest.pop("tokens_b"), f"{where}.tokens_b")
    return MixtureSource(source_id, tokens_b, rest)


def _read_flow(name: str, value: Any, path: str | Path) -> Flow:
    where = f"{path}: flow.{name}"
    table = tables.table(value, where)
    tables.refuse_unknown(table, _FLOW_KEYS, where)
    stages = tables.table(table.get("mixture"), f"{where}.mixture")
    if not stages:
        raise ConfigError("a flow needs at least one stage", where=f"{where}.mixture")
    tables.refuse_unknown(stages, STAGE_ORDER, f"{where}.mixture")
    listed = table.get("stages", list(stages))
    if not isinstance(listed, list) or sorted(map(str, listed)) != sorted(stages):
        raise ConfigError(
            "stages and the mixture table disagree",
            where=where,
            found=f"stages = {listed!r}",
            expected=f"the keys of its mixture table: {sorted(stages)}",
        )
    override = tables.table(table.get("tokens_b_override", {}), f"{where}.tokens_b_override")
    tables.refuse_unknown(override, tuple(stages), f"{where}.tokens_b_override")
    given = [key for key in ("tokens_b", "tokens_b_ratio", "scale") if key in table]
    if len(given) > 1:
        raise ConfigError("more than one budget", where=where, found=" and ".join(given))
    numbers = {
        key: tables.number(table[key], f"{where}.{key}", positive=True)
        for key in (*given, "sample_temperature")
        if key in table
    }
    return Flow(
        name=name,
        mixture={k: tables.text(v, f"{where}.mixture.{k}") for k, v in stages.items()},
        tokens_b_override={
            k: tables.number(v, f"{where}.tokens_b_override.{k}", positive=True)
            for k, v in override.items()
        },
        **numbers,
    )
