"""Which labelled documents may be measured on: those that no head was trained on, each text once.

Documents are compared by what the heads see of them (`content_digests`), not by their ids: a corpus
holds the same text under several ids, in train and in val.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Documents to measure on.

    `rows` is bool `[N]`; `num_seen` documents are left out because of their content, `num_repeated`
    because an earlier one has the same content.
    """

    rows: np.ndarray
    num_seen: int
    num_repeated: int


def held_out(contents: Sequence[Any] | np.ndarray, seen: np.ndarray | Sequence[Any]) -> HeldOut:
    """The documents whose content is not among `seen`, the first one of each content.

    Args:
        contents: Digest of each document's content, `[N]`.
        seen: Digests of the contents that were fitted on.
    """
    digests = np.asarray(contents)
    is_seen = np.isin(digests, np.asarray(seen, digests.dtype))
    is_first = np.zeros(len(digests), np.bool_)
    is_first[np.unique(digests, return_index=True)[1]] = True
    rows = ~is_seen & is_first
    return HeldOut(rows, int(is_seen.sum()), int((~is_seen & ~is_first).sum()))
