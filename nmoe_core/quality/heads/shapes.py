"""Shapes of the heads, the blocks that they read, and the training schedule. This module does not
import torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmoe_core.base.errors import HeadError
from nmoe_core.engine import tap_layers
from nmoe_core.engine.weights.families import GPT_OSS
from nmoe_core.labels.scores import QUALITY

if TYPE_CHECKING:
    from nmoe_core.engine import Transformer

_SWITCHES = ("nan_to_num", "is_normalised", "has_second_pass")


@dataclass(frozen=True, slots=True)
class ProbeArch:
    """Shape of a probe.

    `hidden_size` counts the pooled states of all blocks that it reads. `nan_to_num` marks a probe
    of the first published form, see `layer_norm`. A probe of the second form reads pooled states
    without normalising them; a ridge regression too, whose weights standardise them.
    """

    hidden_size: int
    nan_to_num: bool = False
    is_normalised: bool = True
    num_scores: int = len(QUALITY)


@dataclass(frozen=True, slots=True)
class JudgeArch:
    """Shape of a judge: encoder width, attention heads, feed-forward width.

    `nan_to_num` marks a judge of a published form, see `layer_norm`. A judge of the second form has
    no second pass, so it can grade but cannot be trained.
    """

    hidden_size: int
    mid_dim: int = 512
    num_heads: int = 8
    ffn_dim: int = 2048
    nan_to_num: bool = False
    has_second_pass: bool = True
    num_scores: int = len(QUALITY)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Training schedule: documents per step, passes over the documents, peak learning rate."""

    batch_size: int
    epochs: int
    lr: float
    weight_decay: float = 1e-4
    seed: int = 0


def arch_to_dict(arch: ProbeArch | JudgeArch) -> dict[str, Any]:
    """A shape as head files record it. The number of scores is omitted if it is five, as in older
    files."""
    fields = asdict(arch)
    if arch.num_scores == len(QUALITY):
        del fields["num_scores"]
    return fields


def arch_from_dict(value: Any) -> ProbeArch | JudgeArch:
    """The shape in a header.

    Raises:
        TypeError: The value is not a table, or a field is missing, unknown or of the wrong type.
        ValueError: The kind is neither probe nor judge, or no head can have this size.
    """
    if not isinstance(value, dict):
        raise TypeError(f"the shape is a {type(value).__name__}")
    fields = dict(value)
    match kind := fields.pop("kind", None):
        case "probe":
            arch = ProbeArch(**fields)
        case "judge":
            arch = JudgeArch(**fields)
        case _:
            raise ValueError(f"unknown kind of head {kind!r}")
    for key, item in asdict(arch).items():
        if type(item) is not (bool if key in _SWITCHES else int):
            raise TypeError(f"{key} is {item!r}")
        if item < 1 and key not in _SWITCHES:
            raise ValueError(f"{key} is {item}")
    return arch


def tap_of(kind: str, model: Transformer, tap: Any = None, where: Path | None = None) -> int:
    """The number of the block that a head reads. By default: of gpt-oss, the blocks that the
    published heads read; of other models, the judge reads the block at three fifths of the depth.
    Raises HeadError if the backbone has no such block (E-HEAD-FORMAT)."""
    depth = model.config.num_hidden_layers
    if tap is None:
        if kind == "judge" and model.config.family != GPT_OSS:
            return max(1, round(depth * 3 / 5))
        return tap_layers(depth)[kind == "judge"]
    if type(tap) is not int or not 1 <= tap <= depth:
        raise HeadError(
            "the backbone has no such block",
            where=where,
            found=f"tap {tap!r}"[:80],
            expected=f"1 to {depth}",
            code="E-HEAD-FORMAT",
        )
    return tap


def taps_of(model: Transformer, taps: Any, where: Path | None = None) -> tuple[int, ...]:
    """The blocks in the header of a probe: one number, or an ascending list. Raises as `tap_of`."""
    if not isinstance(taps, list) or not taps:
        return (tap_of("probe", model, taps, where),)
    found = tuple(tap_of("probe", model, tap, where) for tap in taps)
    if sorted({*found}) != [*found]:
        raise HeadError(
            "the blocks of the probe are not ascending",
            where=where,
            found=f"tap {taps}"[:80],
            code="E-HEAD-FORMAT",
        )
    return found


def probe_blocks(depth: int) -> tuple[int, ...]:
    """The blocks of which a probe chooses those that it reads: at tenths of the depth, up to eight
    tenths. Later blocks turn to the next token; heads read them worse, and they cost a fifth."""
    return tuple(sorted({max(1, round(depth * i / 10)) for i in range(1, 9)}))
