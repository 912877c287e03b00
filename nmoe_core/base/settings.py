"""Settings that the configuration shares with the rooms that read it.

They stand here because the configuration lies below those rooms and must not import them.
"""

from __future__ import annotations

from typing import Literal

DEFAULT_TOKENIZER = "o200k_harmony"
DEFAULT_TOKENS_PER_SHARD = 500_000_000
ExpertChoice = Literal["auto", "decoded", "packed"]
