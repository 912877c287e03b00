"""Document orders: permutations that decide what a training window holds.

An order is a function of the topic and the length of each document, `order(doc_clusters,
doc_tokens, **options) -> int64 [N]`: position -> document. All take int64 `[N]` twice, as `arrange`
checks them, are pure and deterministic, and break ties by the lower document number. `seed` and
`epoch` turn an order into another one as good, in independent directions, so that no epoch repeats.
`golden` needs no window length. `window_fill` is for one exact length.
The claims are about what windows are composed of, not about the loss of a model.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nmoe_core.curate.order.baselines import bin_packing, original, round_robin, shuffle, stratified
from nmoe_core.curate.order.chain import related
from nmoe_core.curate.order.filling import window_fill
from nmoe_core.curate.order.input import check_rows, refusal
from nmoe_core.curate.order.spacing import balance_tokens, count_stride, deal, golden, insert_only

__all__ = [
    "NEEDS",
    "ORDERS",
    "Order",
    "arrange",
    "balance_tokens",
    "bin_packing",
    "count_stride",
    "deal",
    "golden",
    "insert_only",
    "original",
    "related",
    "round_robin",
    "shuffle",
    "stratified",
    "window_fill",
]

Order = Callable[..., np.ndarray]
_MAX_SEED = 2**32  # above it the fraction of seed times a constant loses digits

ORDERS: dict[str, Order] = {
    "golden": golden,
    "window_fill": window_fill,
    "count_stride": count_stride,
    "balance_tokens": balance_tokens,
    "insert_only": insert_only,
    "bin_packing": bin_packing,
    "stratified": stratified,
    "round_robin": round_robin,
    "related": related,
    "shuffle": shuffle,
    "original": original,
}

# Options that an order requires.
NEEDS: dict[str, tuple[str, ...]] = dict.fromkeys(ORDERS, ()) | {
    "window_fill": ("seq_len",),
    "bin_packing": ("seq_len",),
    "related": ("embeddings",),
}


def arrange(name: str, doc_clusters: np.ndarray, doc_tokens: np.ndarray, **options) -> np.ndarray:
    """The order called `name`, on checked input.

    Args:
        name: A key of `ORDERS`.
        doc_clusters: Topic of each document, in source order: non-negative integers `[N]`.
        doc_tokens: Length of each document in tokens, EOS included: non-negative integers `[N]`.
        options: Of the order; every order takes `seed` and `epoch`, and needs those of `NEEDS`.

    Returns:
        int64 `[N]`: the document at each position, a permutation.

    Raises:
        CurationError: No such order, a needed option is missing, or arrays, seed or epoch are not
            as above (E-CURATION-ORDER).
    """
    if name not in ORDERS:
        raise refusal("no such order", name, f"one of {', '.join(ORDERS)}")
    for needed in NEEDS[name]:
        if options.get(needed) is None:
            raise refusal(f"{name} needs {needed}", "none", f"{needed}=...")
    clusters, tokens = check_rows(doc_clusters, doc_tokens)
    for what in ("seed", "epoch"):
        if not 0 <= options.get(what, 0) < _MAX_SEED:
            raise refusal(f"{what} is out of range", options[what], f"0 to {_MAX_SEED - 1}")
    return ORDERS[name](clusters, tokens, **options)
