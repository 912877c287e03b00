"""A document's bits do not depend on its batch: features of training and grading are the same.

Products of fixed shapes make it so with MKL and oneDNN on x86; other libraries may round otherwise.
"""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from nmoe_core.engine import Transformer

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="seen with MKL and oneDNN only"
)
LENGTHS = torch.tensor([1, 33, 16, 80, 17, 64, 65])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_document_has_the_same_bits_alone_and_in_any_batch(tiny_dir: Path, dtype: torch.dtype):
    model = Transformer.from_checkpoint(tiny_dir, dtype=dtype)
    ids = torch.randint(0, 300, (7, 80), generator=torch.Generator().manual_seed(5))
    logits, hidden = model(ids, LENGTHS, return_hidden_states=(3, 4))
    order = torch.tensor([6, 2, 3])
    _, reordered = model(ids[order], LENGTHS[order], return_hidden_states=(4,))
    for row, document in enumerate(order.tolist()):
        assert torch.equal(reordered[4][row], hidden[4][document])
    for document, length in enumerate(LENGTHS.tolist()):
        alone, states = model(ids[document : document + 1, :length], return_hidden_states=(3, 4))
        assert torch.equal(alone[0], logits[document, :length])
        assert torch.equal(states[3][0], hidden[3][document, :length])
        assert torch.equal(states[4][0], hidden[4][document, :length])
