"""Orders that keep what training has consumed: the documents up to a token stay where they are."""

from __future__ import annotations

import numpy as np

from nmoe_core.curate.order.input import check_rows, refusal


def consumed(tokens_in_order: np.ndarray, from_token: int) -> int:
    """Documents at the front of an order that hold its first `from_token` tokens.

    The document that `from_token` falls into is counted whole.

    Raises:
        CurationError: The token is not in the order (E-CURATION-ORDER).
    """
    ends = np.cumsum(tokens_in_order)
    total = int(ends[-1]) if len(ends) else 0
    if not 0 <= from_token <= total:
        raise refusal("from_token is not in the order", from_token, f"0 to {total}")
    return int(np.searchsorted(ends, from_token, side="left")) + 1 if from_token else 0


def resume(
    previous: np.ndarray,
    from_token: int,
    doc_clusters: np.ndarray,
    doc_tokens: np.ndarray,
    then: str = "golden",
    **options,
) -> np.ndarray:
    """The consumed front of `previous` as it was, then the other documents in a new order.

    Args:
        previous: int `[M]`, M <= N: the order in use, as document numbers.
        from_token: Tokens of it that training has consumed.
        doc_clusters: int `[N]`, new documents after the old ones.
        doc_tokens: int `[N]`.
        then: Order of the rest, old and new together.
        options: Of that order; `window_fill` is told where in a window the front ends.

    Returns:
        int64 `[N]`.

    Raises:
        CurationError: As `arrange`; or `previous` names a document twice or one that is not there,
            or the token is not in it (E-CURATION-ORDER).
    """
    from nmoe_core.curate.order import arrange

    clusters, tokens = check_rows(doc_clusters, doc_tokens)
    old = np.asarray(previous, np.int64)
    inside = not len(old) or (old.min() >= 0 and old.max() < len(tokens))
    if not inside or len(np.unique(old)) != len(old):
        raise refusal("previous is not an order", f"{len(old)} numbers", "each document once")
    front = old[: consumed(tokens[old], from_token)]
    is_left = np.ones(len(tokens), bool)
    is_left[front] = False
    rest = np.flatnonzero(is_left)
    if then == "window_fill":
        options["offset"] = int(tokens[front].sum()) % options["seq_len"]
    for name in ("by", "groups", "embeddings"):
        if options.get(name) is not None:
            options[name] = np.asarray(options[name])[rest]
    return np.concatenate([front, rest[arrange(then, clusters[rest], tokens[rest], **options)]])
