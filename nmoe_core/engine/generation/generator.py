"""Generation for many prompts at once: a paged cache, continuous batching, shared beginnings.

A sequence's tokens are a function of its prompt and its request alone: greedy tokens are the same
in any batch in float32 (bit for bit with `batch_invariant`), and sampled ones depend on seed and
position. Costs `num_pages` pages for each block that sees everything.

Tokens are chosen on the device of the logits. On a GPU a pass takes the tokens of the previous pass
from there, and the host reads them while it runs: a stop id is noticed one pass late, and the later
pass's result for the sequence is discarded. On a CPU they are read immediately.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nmoe_core.base.errors import StateError
from nmoe_core.engine.generation.cache import PagedCache
from nmoe_core.engine.generation.prefixes import PrefixTree
from nmoe_core.engine.generation.requests import (
    Completion,
    GeneratorOptions,
    Request,
    check_size,
    checked_prompt,
    refused,
)
from nmoe_core.engine.generation.sampling import Sampling, checked, choose
from nmoe_core.engine.generation.scheduler import Planned, Scheduler, wanted_rows
from nmoe_core.engine.generation.scheduler import Sequence as Running
from nmoe_core.engine.model import Transformer, check_vocabulary
from nmoe_core.engine.rotation import rotation_table
from nmoe_core.engine.transfers import Arriving, on_device

# Stands for a token that is known on the device alone.
UNKNOWN = -1
# Requests under way in `complete`, with their places, by the ids of their sequences.
Taken = dict[int, tuple[int, Request]]


@dataclass(frozen=True, slots=True)
class Launched:
    """A pass whose tokens the host does not know yet: one token per sequence, for its `places`."""

    ids: Arriving
    sequences: list[Running]
    places: list[int]

    def fill(self, ids: Tensor, wanted: list[tuple[int, Running]]) -> None:
        """Put the tokens of sequences that end with an unknown one into their rows of `ids`."""
        own = {sequence.seq_id: row for row, sequence in enumerate(self.sequences)}
        pairs = [(row, own[s.seq_id]) for row, s in wanted if s.tokens[-1] == UNKNOWN]
        if pairs:
            rows, sources = on_device(np.array(pairs).T, ids.device)
            # Clamped now, since it must be a token; not-finite logits are rejected on read.
            ids[rows] = self.ids.values[sources].clamp(min=0)


class BatchedGenerator:
    """Generates for up to `max_batch` sequences at a time; any number may wait.

    Args:
        checkpoint: A loaded model, or the directory of one.
        max_seq_len: Most tokens of a sequence, prompt and new ones.
        max_batch: Sequences that run at once.
        device: Device to load a checkpoint on; a model stays on its own.
        dtype: As `Transformer.from_checkpoint`, for a checkpoint.
        options: Sizes of the cache and of a pass, and batch invariance.

    Attributes:
        counts: Work done so far.
        launches_ahead: Whether `complete` launches a pass before it reads the tokens of the
            previous pass.

    Raises:
        ConfigError: A size is out of range (E-CONFIG-GENERATE).
    """

    def __init__(
        self,
        checkpoint: Transformer | str | Path,
        max_seq_len: int = 512,
        max_batch: int = 32,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        options: GeneratorOptions = GeneratorOptions(),  # noqa: B008 (frozen)
    ) -> None:
        check_size("max_seq_len", max_seq_len, 2)
        check_size("max_batch", max_batch, 1)
        max_pages = -(-max_seq_len // options.page_size)
        num_pages = max_batch * max_pages if options.num_pages is None else options.num_pages
        check_size("num_pages", num_pages, max_pages)
        if isinstance(checkpoint, str | Path):
            checkpoint = Transformer.from_checkpoint(checkpoint, None, device or "cpu", dtype)
        self.model = checkpoint
        self.max_seq_len = max_seq_len
        self.max_batch = max_batch
        config = checkpoint.config
        embedding = checkpoint.embedding
        if max_seq_len > config.max_position_embeddings:
            expected = f"at most the model's {config.max_position_embeddings}"
            raise refused("max_seq_len is out of range", max_seq_len, expected)
        self.cache = PagedCache(
            config, max_batch, max_seq_len, num_pages, options.page_size, embedding
        )
        self.prefixes = PrefixTree(self.cache, options.max_prefixes)
        self._scheduler = Scheduler(self.cache, self.prefixes, options.max_step_tokens)
        self.counts = self._scheduler.counts
        self._rotation = rotation_table(config, max_seq_len, embedding.device)
        self._launched: Launched | None = None
        self.batch_invariant = options.batch_invariant
        self.launches_ahead = embedding.is_cuda

    @property
    def idle(self) -> bool:
        """Whether no sequence is waiting or running."""
        return not self._scheduler.sequences

    def is_idle(self) -> bool:
        """As `idle`."""
        return self.idle

    def add(self, tokens: Sequence[int], max_tokens: int | None = None) -> int:
        """Queue a prompt for `max_tokens` new tokens, by default as many as fit; returns its
        sequence's id.

        Raises:
            ConfigError: Prompt and new tokens do not fit, or there are none (E-CONFIG-GENERATE).
            TokenizerError: An id is outside the vocabulary (E-TOKENIZER-VOCAB).
        """
        prompt = self._checked(tokens, max_tokens)
        room = self.max_seq_len - len(prompt)
        return self._scheduler.add(prompt, room if max_tokens is None else max_tokens)

    def add_request(self, tokens: Sequence[int], max_tokens: int = 256) -> int:
        """As `add`."""
        return self.add(tokens, max_tokens)

    def step(self) -> tuple[Tensor, list[int]] | None:
        """Logits float32 [B, vocab] of the next tokens of B sequences, and their ids; None if idle.

        Prompts are prefilled along the way. Each sequence returned waits for its answer by
        `update`; the others continue without it, until all wait (E-STATE-SEQUENCE).
        """
        made = self._next_pass()
        if made is not None:
            return made[0], [sequence.seq_id for sequence in made[1]]
        if not self.idle:
            raise StateError(
                "every sequence awaits the token chosen for it",
                found=f"{len(self._scheduler.sequences)} sequences",
                do="call update(seq_id, token) for each sequence that step() returned",
                code="E-STATE-SEQUENCE",
            )
        return None

    def update(self, seq_id: int, token: int, finished: bool = False) -> None:
        """Give a sequence its next token; it ends if `finished`, or with its last allowed token.

        Raises:
            StateError: The sequence awaits no token (E-STATE-SEQUENCE).
            TokenizerError: The id is outside the vocabulary (E-TOKENIZER-VOCAB).
        """
        sequence = self._scheduler.sequences.get(seq_id)
        if sequence is None or sequence.is_answered:
            raise StateError(f"sequence {seq_id} awaits no token", code="E-STATE-SEQUENCE")
        check_vocabulary(token, self.model.config)
        self._scheduler.answer(sequence, int(token))
        if finished:
            self._scheduler.end(sequence)

    def cancel(self, seq_id: int) -> None:
        """End a sequence, waiting or running; refuses one that has ended (E-STATE-SEQUENCE)."""
        if seq_id not in self._scheduler.sequences:
            raise StateError(f"sequence {seq_id} is not there", code="E-STATE-SEQUENCE")
        self._scheduler.end(self._scheduler.sequences[seq_id])

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 256,
        temperature: float = 0.0,
        *,
        sampling: Sampling | None = None,
        stop_ids: Iterable[int] = (),
    ) -> list[list[int]]:
        """New tokens of every prompt, in their order; a stop id ends one and is left out.

        Prompt i is sampled at `temperature`, or as `sampling` says, with seed `sampling.seed + i`.
        All prompts are checked before any is begun. Raises as `complete`.
        """
        base = sampling or Sampling(temperature)
        stops = frozenset(stop_ids)
        requests = [
            Request(prompt, max_tokens, replace(base, seed=base.seed + i), stops)
            for i, prompt in enumerate(prompts)
        ]
        for request in requests:
            self.check(request)
        done = sorted(self.complete(requests), key=lambda completion: completion.index)
        return [completion.tokens for completion in done]

    def check(self, request: Request) -> None:
        """Refuse what `complete` would refuse; raises as `add`."""
        self._checked(request.tokens, request.max_tokens)

    def complete(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Completions of requests as they end, in any order.

        Requests are taken as there is room, `max_batch` ahead of the running ones.

        Raises:
            ConfigError: As `add`, or the generator is not idle (E-CONFIG-GENERATE).
            TokenizerError: As `add`.
            CheckpointError: The logits are not finite (E-CHECKPOINT-LOGITS).
        """
        if not self.idle:
            raise refused("other sequences are under way", len(self._scheduler.sequences), "none")
        source = enumerate(requests)
        taken = Taken()
        try:
            while True:
                for index, request in itertools.islice(source, 2 * self.max_batch - len(taken)):
                    taken[self.add(request.tokens, request.max_tokens)] = index, request
                if not taken:
                    return
                yield from self._advance(taken)
        finally:
            self._launched = None
            for seq_id in taken.keys() & self._scheduler.sequences.keys():
                self.cancel(seq_id)

    def _next_pass(self) -> tuple[Tensor, list[Running]] | None:
        """Logits of the next tokens, and their sequences; None if no sequence can continue."""
        while planned := self._scheduler.plan():
            wanted = wanted_rows(planned)
            logits = self._run(planned, wanted)
            self._scheduler.commit(planned)
            if wanted:
                return logits, [sequence for _, sequence in wanted]
        return None

    def _run(self, planned: list[Planned], wanted: list[tuple[int, Running]]) -> Tensor:
        """One pass; logits of the rows wanted."""
        chunks = [part.chunk for part in planned]
        tokens = [part.sequence.tokens[part.chunk.start : part.chunk.stop] for part in planned]
        device = self._rotation.device
        context = self.model.runtime.step(self.cache, chunks, self.batch_invariant)
        ids = on_device(np.concatenate(tokens).astype(np.int64), device)
        if self._launched is not None:
            self._launched.fill(ids, wanted)
        rows = on_device(np.array([row for row, _ in wanted], np.int64), device)
        return self.model.extend(ids, context, self._rotation[context.positions], rows)

    def _advance(self, taken: Taken) -> list[Completion]:
        """One pass of the running requests; requests that end leave `taken`."""
        before = self._launched
        made = self._next_pass()
        assert before is not None or made is not None
        launched = None if made is None else self._choose(*made, taken)
        if not self.launches_ahead:
            before = launched
            launched = None
        self._launched = launched
        return [] if before is None else self._read(before, taken)

    def _choose(self, logits: Tensor, sequences: list[Running], taken: Taken) -> Launched:
        """Choose the sequences' tokens, on the device; a sequence ends with its last one."""
        samplings = [taken[sequence.seq_id][1].sampling for sequence in sequences]
        places = [len(sequence.tokens) for sequence in sequences]
        launched = Launched(Arriving(choose(logits, samplings, places)), sequences, places)
        for sequence in sequences:
            self._scheduler.answer(sequence, UNKNOWN)
        return launched

    def _read(self, launched: Launched, taken: Taken) -> list[Completion]:
        """Give sequences the tokens of a pass; sequences that have ended leave `taken`."""
        done = []
        tokens = checked(launched.ids.tolist())
        for sequence, place, token in zip(launched.sequences, launched.places, tokens):
            if sequence.seq_id not in taken:
                continue
            index, request = taken[sequence.seq_id]
            sequence.tokens[place] = token
            new = sequence.tokens[sequence.num_prompt : place + 1]
            if token in request.stop_ids:
                done.append(Completion(index, new[:-1], "stop", token))
            elif len(new) == sequence.max_tokens:
                done.append(Completion(index, new, "length", None))
            else:
                continue
            del taken[sequence.seq_id]
            self._scheduler.end(sequence)
        return done

    def _checked(self, tokens: Sequence[int], max_tokens: int | None) -> list[int]:
        prompt = checked_prompt(tokens, max_tokens, self.max_seq_len)
        for token in (min(prompt), max(prompt)):
            check_vocabulary(token, self.model.config)
        return prompt
