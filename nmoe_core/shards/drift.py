"""How far the values of columns moved between two versions of a file."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# Bins of a column.
_NUM_PARTS = 10
_NUM_TEXTS = 20


def drift(old: pa.Table, new: pa.Table) -> dict[str, float]:
    """Drift of each column of numbers, booleans or texts that both tables have: the share of values
    that moved to another bin, which is half the sum of absolute differences between bin shares.
    Bins are deciles of the old numbers, or the 20 most common old texts and one bin for the rest;
    nulls are one more bin. The share that other documents of the same distribution would move is
    subtracted."""
    found = {}
    for name in old.column_names:
        if name in new.column_names and old.num_rows and new.num_rows:
            both = [table.column(name).combine_chunks() for table in (old, new)]
            if both[0].type == both[1].type and (parts := _parts(both[0])) is not None:
                shares = [_shares(values, parts) for values in both]
                moved = float(np.abs(shares[0] - shares[1]).sum() / 2)
                found[name] = max(0.0, moved - _by_chance(shares, old.num_rows, new.num_rows))
    return found


def _by_chance(shares: Sequence[np.ndarray], num_old: int, num_new: int) -> float:
    """The drift to expect between independent samples of one distribution, and three standard
    deviations of it: bins differ by normal deviates, whose mean size is sqrt(2 / pi)."""
    pooled = (shares[0] * num_old + shares[1] * num_new) / (num_old + num_new)
    variances = pooled * (1 - pooled) * (1 / num_old + 1 / num_new)
    expected = np.sqrt(2 / np.pi) * np.sqrt(variances).sum() / 2
    return float(expected + 3 * np.sqrt((1 - 2 / np.pi) * variances.sum()) / 2)


def _parts(old: pa.Array) -> np.ndarray | pa.Array | None:
    """Lower edges of the bins of numbers, or the common texts; None for other types."""
    kind = old.type
    values = old.drop_null()
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        texts, counts = values.value_counts().flatten()
        order = np.argsort(-counts.to_numpy(), kind="stable")[:_NUM_TEXTS]
        return texts.take(pa.array(order))
    if pa.types.is_boolean(kind):
        return np.array([0.0, 1.0])
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        ranked = np.sort(values.to_numpy(zero_copy_only=False).astype(np.float64))
        places = np.linspace(0, len(ranked), _NUM_PARTS, endpoint=False).astype(np.int64)
        return np.unique(ranked[places]) if len(ranked) else np.array([0.0])
    return None


def _shares(values: pa.Array, parts: np.ndarray | pa.Array) -> np.ndarray:
    """Share of each bin, then of values outside all bins, then of nulls."""
    known = values.drop_null()
    if isinstance(parts, pa.Array):
        places = pc.call_function("index_in", [known], pc.SetLookupOptions(value_set=parts))
        numbers = places.fill_null(-1).to_numpy() + 1
    else:
        floats = known.to_numpy(zero_copy_only=False).astype(np.float64)
        numbers = np.searchsorted(parts, floats, side="right")
    counts = np.bincount(numbers, minlength=len(parts) + 1)
    return np.append(counts, values.null_count) / len(values)
