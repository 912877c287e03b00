"""The forms of a batch: its arrays, and what is known of its rows."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from loader.files.spans import (
    IGNORE_INDEX,
    Spans,
    attention_mask,
    cu_seqlens,
    document_ids,
    position_ids,
)

FORMS = ("pair", "dict", "batch")
# Extras that have one value per row, and extras that need the documents of the rows.
OF_ROWS = ("source_index", "stage_index", "sequence_index", "lr_scale")
OF_DOCUMENTS = ("position_ids", "document_ids", "attention_mask", "cu_seqlens")


class Batch(NamedTuple):
    """A batch and its origin.

    Attributes:
        inputs, targets: `[local_batch, seq_len]`.
        source_index: int64 [local_batch], each row's index in `source_names`.
        source_names: Names of the plan's sources.
        document_spans: Per row int64 [num_documents, 2], start and end of its documents in
            `inputs`, end exclusive and past the EOS; the first and last may be parts of documents.
            None if a source has no index files.
        lr_scale: Factor of the learning rate at this step.
        sequence_index: int64 [local_batch], each row's number in the global stream; two ranks that
            share a row have the same number.
        global_sequence_index: Number of the first sequence of the global batch; equal on all ranks.
        stage_index: int64 [local_batch], each row's index in `plan.stages`, where each phase is a
            stage; -1 for valid.
    """

    inputs: Any
    targets: Any
    source_index: np.ndarray
    source_names: tuple[str, ...]
    document_spans: tuple[np.ndarray, ...] | None
    lr_scale: float
    sequence_index: np.ndarray
    global_sequence_index: int
    stage_index: np.ndarray


def formed(batch: Batch, form: str, extras: Sequence[str], scales: np.ndarray | None = None) -> Any:
    """A batch in one of the `FORMS`, which `loader.batches.MemoryOptions` describes. scales: each
    row's factor of the learning rate, if rows of several steps are read together."""
    if form == "batch":
        return batch
    inputs = batch.inputs
    targets = batch.targets
    if form == "pair":
        return inputs, targets
    labels = targets.clone() if hasattr(targets, "clone") else targets.copy()
    labels[:, 0] = IGNORE_INDEX
    labels[:, 1:] = targets[:, :-1]
    found = {"input_ids": inputs, "labels": labels, "shift_labels": targets}
    for name in extras:
        if name == "lr_scale":
            same = np.full(len(inputs), batch.lr_scale)
            found[name] = _like(inputs, same if scales is None else scales)
        elif name in OF_ROWS:
            found[name] = _like(inputs, getattr(batch, name))
        else:
            found |= _of_documents(name, inputs, batch.document_spans or ())
    return found


def _of_documents(name: str, inputs: Any, spans: Spans) -> dict[str, Any]:
    seq_len = inputs.shape[1]
    if name == "cu_seqlens":
        edges = cu_seqlens(spans, seq_len)
        longest = int(np.diff(edges).max())
        lengths = _like(inputs, edges)
        found = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
        return {**found, "max_length_q": longest, "max_length_k": longest}
    if name == "attention_mask":  # made on the device, to which document ids are copied
        return {name: attention_mask(_like(inputs, document_ids(spans, seq_len)))}
    make: Callable[..., np.ndarray] = position_ids if name == "position_ids" else document_ids
    return {name: _like(inputs, make(spans, seq_len))}


def _like(inputs: Any, array: np.ndarray) -> Any:
    """The array in the type, and on the device, of the inputs."""
    if isinstance(inputs, np.ndarray):
        return array
    return sys.modules["torch"].from_numpy(array).to(inputs.device)
