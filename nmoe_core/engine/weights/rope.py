"""Scalings of the rotary frequencies, and their form in `config.json`.

A file has one of two forms: the fields `rope_scaling` and `rope_theta`, or the field
`rope_parameters`, which contains both.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nmoe_core.engine.weights.fields import bad_field, take, variant


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """NTK-by-parts scaling of the rotary frequencies (YaRN, arXiv 2309.00071).

    `truncate` rounds the ends of the blending range to whole dimensions; gpt-oss does not.
    `attention_factor` scales the rotation; None means 0.1 ln(factor) + 1.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = False
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _check_above_zero(self, "factor", "original_max_position", "beta_fast", "beta_slow")
        if self.attention_factor is not None:
            _check_above_zero(self, "attention_factor")


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        _check_above_zero(self, "factor")


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, the rest blended (Llama 3.1).

    A frequency is low if it makes fewer than `low_freq_factor` turns over the original context, and
    high if it makes more than `high_freq_factor` turns.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        _check_above_zero(self, "factor", "low_freq_factor", "original_max_position")
        if not self.high_freq_factor > self.low_freq_factor:
            expected = f"above low_freq_factor {self.low_freq_factor}"
            raise bad_field("rope_scaling.high_freq_factor", self.high_freq_factor, expected)


RopeScaling = YarnScaling | LinearScaling | Llama3Scaling
_KINDS: dict[str, type[RopeScaling]] = {
    "yarn": YarnScaling,
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
}
_LONG = "original_max_position_embeddings"


def read_rope(
    raw: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[float, RopeScaling | None]:
    """Theta and scaling of a `config.json`; `defaults` are values of fields that it may omit.

    Raises CheckpointError if a field is missing or out of range, or the two forms of the field
    differ (E-CHECKPOINT-CONFIG), or if the scaling or one of its keys is unknown
    (E-CHECKPOINT-ARCH).
    """
    both = [field for field in ("rope_parameters", "rope_scaling") if raw.get(field)]
    if len(both) == 2:  # releases of transformers differ in which field they use
        by_scaling, by_parameters = (read_rope({**raw, field: None}, defaults) for field in both)
        if by_scaling != by_parameters:
            expected = "the same as rope_parameters: keep one of the two, with rope_theta in it"
            raise bad_field("rope_scaling", raw["rope_scaling"], expected)
    field = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = raw.get(field) or defaults.get(field)
    rope = take({field: rope}, dict, field)
    theta = take({**defaults, **raw, **rope}, float, "rope_theta")
    name = rope.get("rope_type", rope.get("type")) if rope else "default"
    if name not in (*_KINDS, "default"):
        raise variant(f"{field}.rope_type", name, f"one of {', '.join(_KINDS)}, default")
    known = {"rope_theta", "rope_type", "type", *_keys(name)}
    if unknown := sorted(set(rope) - known):
        raise variant(f"{field}.{unknown[0]}", rope[unknown[0]], "no such key")
    if name == "default":
        return theta, None
    values = {**defaults, **{key: value for key, value in rope.items() if value is not None}}
    if raw.get(_LONG) is not None:  # it also takes precedence in transformers
        values[_LONG] = raw[_LONG]
    if name == "linear":
        return theta, LinearScaling(take(values, float, "factor"))
    floats = ("factor", "low_freq_factor", "high_freq_factor")
    if name == "llama3":
        fields = {key: take(values, float, key) for key in floats}
        return theta, Llama3Scaling(**fields, original_max_position=take(values, int, _LONG))
    factor = values.get("attention_factor")
    return theta, YarnScaling(
        factor=take(values, float, "factor"),
        original_max_position=take(values, int, _LONG),
        beta_fast=take(values, float, "beta_fast"),
        beta_slow=take(values, float, "beta_slow"),
        truncate=take(values, bool, "truncate"),
        attention_factor=None if factor is None else take(values, float, "attention_factor"),
    )


def write_rope(scaling: RopeScaling) -> dict[str, Any]:
    """The scaling in the form of `config.json`, with keys in alphabetical order."""
    (name,) = (name for name, kind in _KINDS.items() if isinstance(scaling, kind))
    values = dict(zip(_keys(name), dataclasses.astuple(scaling), strict=True))
    values = {key: value for key, value in values.items() if value is not None}
    return dict(sorted({**values, "rope_type": name}.items()))


def _keys(name: str) -> list[str]:
    """Keys of a kind of scaling in `config.json`, in the order of its fields."""
    names = [field.name for field in dataclasses.fields(_KINDS[name])] if name in _KINDS else []
    return [_LONG if field == "original_max_position" else field for field in names]


def _check_above_zero(scaling: RopeScaling, *names: str) -> None:
    for name in names:
        if not getattr(scaling, name) > 0:
            raise bad_field(f"rope_scaling.{name}", getattr(scaling, name), "above 0")
