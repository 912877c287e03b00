"""MXFP4: every byte with every scale, the order of nibbles, and rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nmoe_core.engine.weights import mxfp4

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def _every_byte_and_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """[256 scales, 16 groups, 16 bytes]: row s holds the 256 bytes in order under scale s."""
    byte = torch.arange(256, dtype=torch.uint8)
    return byte.view(1, 16, 16).repeat(256, 1, 1), byte.view(256, 1).repeat(1, 16)


def test_every_byte_under_every_scale_decodes_exactly():
    blocks, scales = _every_byte_and_scale()
    decoded = mxfp4.decode(blocks, scales)
    codes = np.array([[E2M1[byte & 15], E2M1[byte >> 4]] for byte in range(256)])
    with np.errstate(over="ignore"):
        expected = codes.reshape(1, 512) * 2.0 ** (np.arange(255) - 127.0)[:, None]
        expected = expected.astype(np.float32)
    assert np.array_equal(decoded[:255].numpy(), expected)
    assert np.isfinite(expected[:253]).all()
    assert decoded[255].isnan().all()
    in_bfloat16 = mxfp4.decode(blocks, scales, torch.bfloat16)
    assert torch.equal(in_bfloat16[:255].float(), decoded[:255])


def test_shapes_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match="does not match"):
        mxfp4.decode(torch.zeros(2, 1, 16, dtype=torch.uint8), torch.zeros(1, 1).byte())
    with pytest.raises(ValueError, match="whole groups"):
        mxfp4.encode(torch.zeros(4, 33))


def test_encoding_picks_the_nearest_value_and_ties_go_to_the_even_code():
    grid = torch.arange(-96, 97) / 16
    for start in range(0, len(grid) - 31, 31):
        group = torch.cat([grid[start : start + 31], torch.tensor([6.0])])
        decoded = mxfp4.decode(*mxfp4.encode(group[None]))[0]
        for value, got in zip(group.tolist(), decoded.tolist(), strict=True):
            assert got == _nearest(value)


def _nearest(value: float) -> float:
    """The E2M1 value nearest to `value`; of two, the one whose code is even."""
    code = min(range(8), key=lambda c: (abs(abs(value) - E2M1[c]), c % 2))
    return float(np.copysign(E2M1[code], value))


def test_decoded_values_encode_back_to_themselves_over_the_whole_range():
    generator = torch.Generator().manual_seed(1)
    powers = torch.randint(-120, 120, (64, 2, 1), generator=generator)
    values = torch.randn(64, 2, 32, generator=generator) * torch.exp2(powers.float())
    decoded = mxfp4.decode(*mxfp4.encode(values.flatten(1)))
    assert torch.equal(mxfp4.decode(*mxfp4.encode(decoded)), decoded)
    error = (decoded.view(64, 2, 32) - values).abs().amax(-1)
    assert bool((error <= values.abs().amax(-1) * 0.26).all())


def test_zeros_and_denormals_have_a_scale():
    blocks, scales = mxfp4.encode(torch.tensor([[0.0] * 32 + [2.0**-140] * 32]))
    assert scales.tolist() == [[0, 0]]
    assert mxfp4.decode(blocks, scales).abs().max() == 0
