"""Settings that the configuration shares with the rooms that read it.

They stand here because the configuration lies below those rooms and must not import them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DEFAULT_TOKENIZER = "o200k_harmony"
DEFAULT_TOKENS_PER_SHARD = 500_000_000
ExpertChoice = Literal["auto", "decoded", "packed"]


@dataclass(frozen=True, slots=True)
class RayOptions:
    """How items run on Ray.

    Attributes:
        address: Of the cluster; empty takes `RAY_ADDRESS`, and without that starts Ray here.
        cpus_per_task: Processors that one item holds.
        gpus_per_task: GPUs that one item holds; Ray makes only those visible to it.
        max_retries: How often an item is run again after its worker or its node was lost.
    """

    address: str = ""
    cpus_per_task: float = 1.0
    gpus_per_task: float = 0.0
    max_retries: int = 3
