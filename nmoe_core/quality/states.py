"""Attributes that the backbone computes: pooled states (`embedding`), and `perplexity`.

Documents are read as heads read them: the same ids, the same states, one thread per process. A row
depends only on its document, not on the batch. Cost: one forward pass over the first `max_tokens`
tokens of each document, up to the last block that is asked for. Memory: the states of one batch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from nmoe_core.attributes.columns import FINAL, SCHEMAS, embedding_schema
from nmoe_core.engine import Transformer
from nmoe_core.quality.heads.features import Batch, device_of, pooled, small_batches
from nmoe_core.quality.heads.scores import (
    MAX_FAILED,
    DocumentTokens,
    as_seen,
    one_thread,
    require_few_failed,
)
from nmoe_core.text.models import ModelIds
from nmoe_core.text.tokenizer import Tokenizer

Add = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Reader:
    """A loaded backbone, and how it reads documents.

    Attributes:
        model: The backbone.
        tokenizer: The tokenizer of the backbone's ids.
        ids: Converts the ids of shards to the backbone's ids; None if they are equal.
        max_tokens: Number of tokens that are read per document.
    """

    model: Transformer
    tokenizer: Tokenizer
    ids: ModelIds | None
    max_tokens: int

    def seen(self, tokens: Sequence[np.ndarray]) -> DocumentTokens:
        """Documents as heads read them."""
        eos = self.tokenizer.eos_token_id
        seen = [as_seen(one, eos, self.max_tokens, self.ids) for one in tokens]
        return DocumentTokens([f"document {i} of a part" for i in range(len(seen))], seen)

    def batches(self, documents: DocumentTokens) -> Iterator[Batch]:
        """Batches of documents of similar length, shortest first."""
        order = sorted(range(len(documents)), key=lambda i: len(documents.tokens[i]))
        return small_batches(documents, device_of(self.model), order)


def embedding(
    tokens: Sequence[np.ndarray], add: Add, *, reader: Reader, layers: Sequence[str], pooling: str
) -> pa.Table:
    """Pooled states of documents, float32, with columns as in `embedding_schema`.

    Args:
        tokens: Ids of each document, without EOS.
        add: Called with the number of documents of each finished batch.
        reader: The backbone.
        layers: Numbers of blocks, or `final`.
        pooling: `mean` of a document's states, or the state of its `last` token.

    Raises:
        HeadError: More than a few documents have states that are not finite (E-HEAD-NONFINITE); a
            single one has nulls.
    """
    model = reader.model
    width = model.config.hidden_size
    depth = model.config.num_hidden_layers
    taps = [depth if layer == FINAL else int(layer) for layer in layers]
    documents = reader.seen(tokens)
    rows = np.empty((len(layers), len(documents), width), np.float32)
    with one_thread(), torch.inference_mode():
        for batch in reader.batches(documents):
            _, states = model(
                batch.input_ids, batch.lengths, return_hidden_states=taps, no_logits=True
            )
            for found, layer, tap in zip(rows, layers, taps):
                hidden = model.norm(states[tap]) if layer == FINAL else states[tap]
                found[batch.rows] = _pooled(hidden, batch.lengths, pooling).cpu()
            add(len(batch.rows))
    is_bad = np.logical_not(np.isfinite(rows).all(axis=(0, 2)))
    _require_few(documents, is_bad, "states of the backbone are not finite")
    schema = embedding_schema(layers, pooling, width)
    columns = []
    for found, field in zip(rows, schema):
        values = pa.array(found.ravel(), pa.float32())
        nulls = pa.array(is_bad)
        columns.append(pa.FixedSizeListArray.from_arrays(values, type=field.type, mask=nulls))
    return pa.table(columns, schema=schema)


def perplexity(tokens: Sequence[np.ndarray], add: Add, *, reader: Reader) -> pa.Table:
    """How well the backbone predicts each document, with columns as in `SCHEMAS`; null for a
    document without a second token. The first token is not predicted.

    `bits_per_byte` is the sum of -log2 of the probabilities of the predicted tokens, divided by the
    bytes of their text; `perplexity` is the exponential of the mean of -log. Arguments and errors
    as for `embedding`.
    """
    documents = reader.seen(tokens)
    losses = np.zeros(len(documents), np.float64)
    with one_thread():
        for batch in reader.batches(documents):
            found = reader.model.log_probs(batch.input_ids, batch.lengths).cpu().numpy()
            for i, length, values in zip(batch.rows, batch.lengths.tolist(), found):
                losses[i] = -values[:length].sum(dtype=np.float64)
            add(len(batch.rows))
    _require_few(documents, ~np.isfinite(losses), "log-probabilities are not finite")
    schema = SCHEMAS["perplexity"]
    rows = []
    for ids, loss in zip(documents.tokens, losses.tolist()):
        count = len(ids) - 1
        row: dict[str, float | None] = dict.fromkeys(schema.names)
        row["n_predicted_tokens"] = count
        decode = reader.tokenizer.decode
        num_bytes = len(decode(ids).encode()) - len(decode(ids[:1]).encode()) if count else 0
        if num_bytes > 0 and math.isfinite(loss):
            row["bits_per_byte"] = loss / math.log(2) / num_bytes
            row["perplexity"] = math.exp(min(loss / count, 700.0))
        rows.append(row)
    return pa.Table.from_pylist(rows, schema)


def _pooled(hidden: Tensor, lengths: Tensor, pooling: str) -> Tensor:
    """Pooled states of each document, float32 `[B, H]`."""
    if pooling == "mean":
        return pooled(hidden, lengths)
    return torch.stack([one[end - 1] for one, end in zip(hidden, lengths.tolist())]).float()


def _require_few(documents: DocumentTokens, is_bad: np.ndarray, reason: str) -> None:
    if is_bad.sum() > MAX_FAILED:
        failed = {documents.names[i]: reason for i in np.flatnonzero(is_bad).tolist()}
        require_few_failed(failed, len(documents))
