"""The passes that a generator makes of what its scheduler plans.

A pass can be launched before the tokens of the one before it are known on the host: these tokens
are then taken from the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nmoe_core.engine.generation.scheduler import Planned, Scheduler, Sequence, wanted_rows
from nmoe_core.engine.model import Transformer
from nmoe_core.engine.rope import rotation_table
from nmoe_core.engine.transfers import Arriving, on_device

# Stands for a token that is known on the device alone.
UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Launched:
    """A pass whose tokens are chosen, one per sequence, but not known on the host.

    `places` are where they belong in their sequences; an unknown token is a sequence's last.
    """

    ids: Arriving
    sequences: list[Sequence]
    places: list[int]

    def fill(self, ids: Tensor, wanted: list[tuple[int, Sequence]]) -> None:
        """Put the tokens of sequences that end with an unknown one into their rows of `ids`."""
        own = {sequence.seq_id: row for row, sequence in enumerate(self.sequences)}
        pairs = [
            (row, own[sequence.seq_id])
            for row, sequence in wanted
            if sequence.tokens[-1] == UNKNOWN
        ]
        if pairs:
            rows, sources = on_device(np.array(pairs).T, ids.device)
            # Clamped now, since it must be a token; not-finite logits are rejected on read.
            ids[rows] = self.ids.values[sources].clamp(min=0)


class Passes:
    """Forward passes over the sequences of a scheduler.

    Attributes:
        launched: The last pass, if its tokens are not known on the host.
    """

    def __init__(
        self, model: Transformer, scheduler: Scheduler, max_seq_len: int, batch_invariant: bool
    ) -> None:
        self._model, self._scheduler = model, scheduler
        self._batch_invariant = batch_invariant
        self._rotation = rotation_table(model.config, max_seq_len, model.embedding.device)
        self.launched: Launched | None = None

    def next(self) -> tuple[Tensor, list[Sequence]] | None:
        """Logits of the next tokens, and whose they are; None when no sequence can go on."""
        while planned := self._scheduler.plan():
            wanted = wanted_rows(planned)
            logits = self._run(planned, wanted)
            self._scheduler.commit(planned)
            if wanted:
                return logits, [sequence for _, sequence in wanted]
        return None

    def _run(self, planned: list[Planned], wanted: list[tuple[int, Sequence]]) -> Tensor:
        """One pass; logits of the rows wanted."""
        chunks = [part.chunk for part in planned]
        tokens = [part.sequence.tokens[part.chunk.start : part.chunk.stop] for part in planned]
        device = self._rotation.device
        context = self._model.step(self._scheduler.cache, chunks, self._batch_invariant)
        ids = on_device(np.concatenate(tokens).astype(np.int64), device)
        if self.launched is not None:
            self.launched.fill(ids, wanted)
        rows = on_device(np.array([row for row, _ in wanted], np.int64), device)
        return self._model.extend(ids, context, self._rotation[context.positions], rows)
