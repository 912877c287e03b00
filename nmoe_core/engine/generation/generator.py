"""Generation for many prompts: a paged cache, continuous batching, shared prefixes.

A sequence's tokens do not depend on other sequences: in float32, greedy tokens are the same in any
batch (with `batch_invariant`, logits are bit-identical), and sampled tokens depend on seed and
position. The cache has `num_pages` pages per block with full attention.

Tokens are chosen on the device of the logits. On a GPU, a pass takes the tokens of the previous
pass from device memory, and the host reads these tokens while the pass runs. So the host notices a
stop id one pass late, and discards the result of the extra pass. On a CPU, tokens are read
immediately.
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
from nmoe_core.engine.generation.sampling import (
    Sampling,
    checked,
    choose,
    drawn_seed,
    log_probabilities,
)
from nmoe_core.engine.generation.scheduler import Planned, Scheduler, wanted_rows
from nmoe_core.engine.generation.scheduler import Sequence as Running
from nmoe_core.engine.model import Transformer, check_vocabulary
from nmoe_core.engine.rotation import rotation_table
from nmoe_core.engine.transfers import Arriving, on_device

# Placeholder for a token that the host has not read from the device yet.
UNKNOWN = -1
# Running requests of `complete` with their indices, by sequence id.
Taken = dict[int, tuple[int, Request]]


@dataclass(frozen=True, slots=True)
class Launched:
    """A pass whose tokens the host has not read yet: one token per sequence, at `places`, and the
    tokens' log-probabilities if a request wants them."""

    ids: Arriving
    logprobs: Arriving | None
    sequences: list[Running]
    places: list[int]

    def fill(self, ids: Tensor, wanted: list[tuple[int, Running]]) -> None:
        """On the device, write the tokens that the host has not read yet into their rows of
        `ids`."""
        own = {sequence.seq_id: row for row, sequence in enumerate(self.sequences)}
        pairs = [(row, own[s.seq_id]) for row, s in wanted if s.tokens[-1] == UNKNOWN]
        if pairs:
            rows, sources = on_device(np.array(pairs).T, ids.device)
            # Clamp now, because the next pass needs a valid id; NaN logits are rejected when the
            # host reads.
            ids[rows] = self.ids.values[sources].clamp(min=0)


class BatchedGenerator:
    """Generates up to `max_batch` sequences at a time; any number may be queued.

    Args:
        checkpoint: A loaded model, or the directory of one.
        max_seq_len: Maximum tokens of a sequence, including the prompt.
        max_batch: Maximum number of running sequences.
        device: Device to load a checkpoint on; a loaded model stays on its device.
        dtype: As for `Transformer.from_checkpoint`; only used if a checkpoint is loaded.
        options: Sizes of the cache and of a pass, and whether results are batch-invariant.

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
        """Queue a prompt for `max_tokens` new tokens (default: as many as fit); returns the
        sequence id.

        Raises:
            ConfigError: The prompt is empty, or prompt and new tokens do not fit
                (E-CONFIG-GENERATE).
            TokenizerError: An id is outside the vocabulary (E-TOKENIZER-VOCAB).
        """
        prompt = self._checked(tokens, max_tokens)
        room = self.max_seq_len - len(prompt)
        return self._scheduler.add(prompt, room if max_tokens is None else max_tokens)

    def step(self) -> tuple[Tensor, list[int]] | None:
        """Logits float32 [B, vocab] of the next tokens of B sequences, and the ids of these
        sequences; None if idle.

        Prompts are prefilled as needed. Each returned sequence waits for `update`; meanwhile,
        `step` continues the other sequences. Raises StateError if all sequences wait
        (E-STATE-SEQUENCE).
        """
        made = self._next_pass()
        if made is not None:
            return made[0], [sequence.seq_id for sequence in made[1]]
        if not self.idle:
            raise StateError(
                "every sequence waits for its next token",
                found=f"{len(self._scheduler.sequences)} sequences",
                do="call update(seq_id, token) for each sequence that step() returned",
                code="E-STATE-SEQUENCE",
            )
        return None

    def update(self, seq_id: int, token: int, finished: bool = False) -> None:
        """Set the next token of a sequence; it ends if `finished`, or after its last allowed token.

        Raises:
            StateError: The sequence does not wait for a token (E-STATE-SEQUENCE).
            TokenizerError: The id is outside the vocabulary (E-TOKENIZER-VOCAB).
        """
        sequence = self._scheduler.sequences.get(seq_id)
        if sequence is None or sequence.is_answered:
            raise StateError(
                f"sequence {seq_id} does not wait for a token", code="E-STATE-SEQUENCE"
            )
        check_vocabulary(token, self.model.config)
        self._scheduler.answer(sequence, int(token))
        if finished:
            self._scheduler.end(sequence)

    def cancel(self, seq_id: int) -> None:
        """End a waiting or running sequence. Raises StateError if it has ended already
        (E-STATE-SEQUENCE)."""
        if seq_id not in self._scheduler.sequences:
            raise StateError(
                f"sequence {seq_id} does not exist or has ended", code="E-STATE-SEQUENCE"
            )
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
        """New tokens of every prompt, in order; a stop id ends a sequence and is not returned.

        Prompts are sampled at `temperature`, or by `sampling`; prompt i has the seed
        `drawn_seed(sampling.seed, i)`. All prompts are checked before the first one starts. Raises
        as `complete`.
        """
        base = sampling or Sampling(temperature)
        stops = frozenset(stop_ids)
        requests = [
            Request(prompt, max_tokens, replace(base, seed=drawn_seed(base.seed, i)), stops)
            for i, prompt in enumerate(prompts)
        ]
        for request in requests:
            self.check(request)
        done = sorted(self.complete(requests), key=lambda completion: completion.index)
        return [completion.tokens for completion in done]

    def check(self, request: Request) -> None:
        """Check a request before `complete`; raises as `add`."""
        self._checked(request.tokens, request.max_tokens)

    def complete(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Completions of requests, in the order in which they finish.

        Requests are read from the iterator as needed, so that at most 2 * `max_batch` requests are
        running or queued.

        Raises:
            ConfigError: As `add`, or the generator is not idle (E-CONFIG-GENERATE).
            TokenizerError: As `add`.
            CheckpointError: The logits are not finite (E-CHECKPOINT-LOGITS).
        """
        if not self.idle:
            raise refused("other sequences are running", len(self._scheduler.sequences), "none")
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
        """Logits of the next tokens, with their sequences; None if no sequence can continue."""
        while planned := self._scheduler.plan():
            wanted = wanted_rows(planned)
            logits = self._run(planned, wanted)
            self._scheduler.commit(planned)
            if wanted:
                return logits, [sequence for _, sequence in wanted]
        return None

    def _run(self, planned: list[Planned], wanted: list[tuple[int, Running]]) -> Tensor:
        """Run one pass; return the logits of the wanted rows."""
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
        """Run one pass of the running requests; finished requests are removed from `taken`."""
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
        """Choose the sequences' tokens on the device; a sequence ends after its last allowed
        token."""
        requests = [taken[sequence.seq_id][1] for sequence in sequences]
        places = [len(sequence.tokens) for sequence in sequences]
        ids = choose(logits, [request.sampling for request in requests], places)
        logprobs = None
        if any(request.logprobs for request in requests):
            logprobs = Arriving(log_probabilities(logits, ids))
        launched = Launched(Arriving(ids), logprobs, sequences, places)
        for sequence in sequences:
            self._scheduler.answer(sequence, UNKNOWN)
        return launched

    def _read(self, launched: Launched, taken: Taken) -> list[Completion]:
        """Read the tokens of a pass into the sequences; ended sequences are removed from
        `taken`."""
        done = []
        tokens = checked(launched.ids.tolist())
        logprobs = [0.0] * len(tokens) if launched.logprobs is None else launched.logprobs.tolist()
        rows = zip(launched.sequences, launched.places, tokens, logprobs)
        for sequence, place, token, logprob in rows:
            if sequence.seq_id not in taken:
                continue
            index, request = taken[sequence.seq_id]
            sequence.tokens[place] = token
            if request.logprobs:
                sequence.logprobs.append(logprob)
            new = sequence.tokens[sequence.num_prompt : place + 1]
            if token in request.stop_ids:
                done.append(Completion(index, new[:-1], "stop", token, sequence.logprobs[:-1]))
            elif request.is_end is not None and request.is_end(new):
                done.append(Completion(index, new, "stop", None, sequence.logprobs))
            elif len(new) == sequence.max_tokens:
                done.append(Completion(index, new, "length", None, sequence.logprobs))
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
