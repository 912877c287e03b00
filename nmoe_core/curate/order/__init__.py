"""Document orders: permutations that determine which documents each training window holds.

An order is a function of the topic and the length of each document, `order(doc_clusters,
doc_tokens, **options) -> int64 [N]`: position -> document. Both inputs are int64 `[N]`; `arrange`
checks them. Orders are pure and deterministic, and break ties by the lower document number. `seed`
and `epoch` each change an order into a different, equally good one, so epochs do not repeat.
"""

from collections.abc import Callable

import numpy as np

from nmoe_core.curate.even_spacing import balance_tokens, count_stride, golden, insert_only, refusal
from nmoe_core.curate.order.baselines import (
    bin_packing,
    original,
    related,
    round_robin,
    shuffle,
    stratified,
)
from nmoe_core.curate.order.window_fill import window_fill

Order = Callable[..., np.ndarray]
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
# The option that an order requires.
NEEDS = {"window_fill": "seq_len", "bin_packing": "seq_len", "related": "embeddings"}
_MAX_SEED = 2**32  # (seed * constant) % 1 loses digits if the seed is larger
_MAX_TOPICS = 2**20  # orders allocate a few numbers per topic, up to the highest topic


def arrange(name: str, doc_clusters: np.ndarray, doc_tokens: np.ndarray, **options) -> np.ndarray:
    """Check the input and compute the order called `name`.

    Args:
        name: A key of `ORDERS`; hyphens are read as underscores.
        doc_clusters: Topic of each document, in source order: non-negative integers `[N]`.
        doc_tokens: Length of each document in tokens, EOS included: non-negative integers `[N]`.
        options: Options of the order. Every order takes `seed` and `epoch`; `NEEDS` names required
            options.

    Returns:
        int64 `[N]`: the document at each position, a permutation.

    Raises:
        CurationError: The order is unknown, a required option is missing, or an array, the seed or
            the epoch is invalid (E-CURATION-ORDER).
    """
    name = name.replace("-", "_")
    if name not in ORDERS:
        raise refusal("no such order", name, f"one of {', '.join(ORDERS)}")
    needed = NEEDS.get(name)
    if needed and options.get(needed) is None:
        raise refusal(f"{name} needs {needed}", "none", f"{needed}=...")
    for what in ("seed", "epoch"):
        if not 0 <= options.get(what, 0) < _MAX_SEED:
            raise refusal(f"{what} is out of range", options[what], f"0 to {_MAX_SEED - 1}")
    clusters = np.asarray(doc_clusters)
    tokens = np.asarray(doc_tokens)
    if clusters.ndim != 1 or clusters.shape != tokens.shape:
        raise refusal("shapes differ", (clusters.shape, tokens.shape), "two arrays of shape [N]")
    for what, values in (("topics", clusters), ("lengths", tokens)):
        if values.dtype.kind not in "iu" or (len(values) and values.min() < 0):
            raise refusal(f"{what} are invalid", values.dtype, "integers, none negative")
    if len(clusters) and clusters.max() >= _MAX_TOPICS:
        raise refusal("a topic id is too large", clusters.max(), f"ids below {_MAX_TOPICS:,}")
    rows = clusters.astype(np.int64, copy=False), tokens.astype(np.int64, copy=False)
    return ORDERS[name](*rows, **options)
