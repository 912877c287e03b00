"""The models of transformers, which the engine's are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nmoe_core.engine import Transformer

transformers = pytest.importorskip("transformers")
LOGITS_ATOL, HIDDEN_RTOL = 2e-4, 1e-5


def load_reference(directory: Path) -> Any:
    """The float32 model of transformers, its MXFP4 experts decoded."""
    config = transformers.AutoConfig.from_pretrained(directory)
    is_quantised = getattr(config, "quantization_config", None) is not None
    decode = {"quantization_config": transformers.Mxfp4Config(dequantize=True)}
    return transformers.GptOssForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        **(decode if is_quantised else {}),
    ).eval()


def assert_equal_to_transformers(
    directory: Path, twin: Path | None = None, length: int = 40
) -> None:
    """Compare logits and hidden states; transformers reads `twin`, if there is one."""
    ours, theirs = Transformer.from_checkpoint(directory), load_reference(twin or directory)
    depth = ours.config.num_hidden_layers
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, ours.config.vocab_size, (2, length), generator=generator)
    logits, hidden = ours(ids, return_hidden_states=range(1, depth + 1))
    with torch.no_grad():
        expected = theirs(ids, output_hidden_states=True, use_cache=False)
    assert (logits - expected.logits).abs().max() <= LOGITS_ATOL
    # The last state of transformers is after the final norm.
    for tap, state in enumerate(expected.hidden_states[1:depth], 1):
        assert (hidden[tap] - state).norm() / state.norm() <= HIDDEN_RTOL
