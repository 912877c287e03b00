"""Kernels run on the CPU here, in small blocks."""

import os

import pytest
import torch

# Before the kernels are imported.
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    for name, size in (("QUERY_BLOCK", 16), ("KEY_BLOCK", 16), ("SPLIT_KEYS", 32)):
        monkeypatch.setattr(f"nmoe_core.engine.kernels.attention.{name}", size)
