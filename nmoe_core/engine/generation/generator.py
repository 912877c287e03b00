"""Generation for many prompts at once: a paged cache, continuous batching, shared beginnings.

A sequence's tokens are a function of its prompt and its request alone: greedy tokens are the same
in any batch in float32 (bit for bit with `batch_invariant`), and sampled ones depend on seed and
position. Requests that cannot fit are refused when they are added. Costs, for each block that sees
everything, `num_pages` pages; a windowed block keeps its window. The largest tensor of a pass is
the logits of the sequences that get a token.

Tokens are chosen where the logits are. On a GPU a pass takes the tokens of the one before it from
there, and they are read on the host while it runs: a stop id is noticed one pass late, and what
that pass made of the sequence is thrown away. On a CPU they are read at once.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from nmoe_core.base.errors import ConfigError, StateError, TokenizerError
from nmoe_core.engine.generation.cache import PagedCache
from nmoe_core.engine.generation.prefixes import PrefixTree
from nmoe_core.engine.generation.sampling import Sampling, checked, choose
from nmoe_core.engine.generation.scheduler import Counts, Planned, Scheduler, wanted_rows
from nmoe_core.engine.generation.scheduler import Sequence as Running
from nmoe_core.engine.model import Transformer
from nmoe_core.engine.rope import rotation_table
from nmoe_core.engine.transfers import Arriving, on_device

FinishReason = Literal["stop", "length"]
# Stands for a token that is known on the device alone.
_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how to go on from it; `stop_ids` end a sequence and are not part of it."""

    tokens: Sequence[int]
    max_tokens: int = 256
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Completion:
    """What request `index` became: its new tokens, and why there are no more.

    `stop_id` is the stop token that came, with reason `stop`; with `length` it is None.
    """

    index: int
    tokens: list[int]
    finish_reason: FinishReason
    stop_id: int | None


@dataclass(frozen=True, slots=True)
class _Launched:
    """A pass whose tokens are chosen, row by row for `seq_ids`, but not known on the host.

    `places` are where they belong in their sequences; a token not known is a sequence's last.
    """

    ids: Arriving
    sequences: list[Running]
    places: list[int]

    def fill(self, ids: Tensor, wanted: list[tuple[int, Running]]) -> None:
        """Put the tokens of sequences that end with an unknown one into their rows of `ids`."""
        own = {sequence.seq_id: row for row, sequence in enumerate(self.sequences)}
        pairs = [
            (row, own[sequence.seq_id])
            for row, sequence in wanted
            if sequence.tokens[-1] == _UNKNOWN
        ]
        if pairs:
            rows, sources = on_device(np.array(pairs).T, ids.device)
            # What is not finite is refused when it is read; until then it must be a token.
            ids[rows] = self.ids.values[sources].clamp(min=0)


class BatchedGenerator:
    """Generates for up to `max_batch` sequences at a time; any number may wait.

    Args:
        checkpoint: A loaded model, or the directory of one.
        max_seq_len: Most tokens of a sequence, prompt and new ones.
        max_batch: Sequences that run at once.
        device: Where a checkpoint is loaded; a model stays where it is.
        dtype: As `Transformer.from_checkpoint`, for a checkpoint.
        page_size: Positions of a page of the cache.
        num_pages: Pages of the cache; by default enough for `max_batch` sequences of any length.
            With fewer, sequences go back to the queue when pages run out and are computed again.
        max_step_tokens: Prompt tokens of one pass. More fill the pass better; running sequences
            wait longer for it.
        max_prefixes: Shared beginnings kept at once; 0 shares nothing.
        batch_invariant: Make a sequence's logits the same to the last bit in any batch; slower.

    Raises:
        ConfigError: A size is out of range (E-CONFIG-GENERATE).
        CheckpointError: As `Transformer.from_checkpoint`.
    """

    def __init__(
        self,
        checkpoint: Transformer | str | Path,
        max_seq_len: int = 512,
        max_batch: int = 32,
        device: str | torch.device | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        page_size: int = 16,
        num_pages: int | None = None,
        max_step_tokens: int = 512,
        max_prefixes: int = 8,
        batch_invariant: bool = False,
    ) -> None:
        max_pages = -(-max_seq_len // max(page_size, 1))
        num_pages = max_batch * max_pages if num_pages is None else num_pages
        _check_sizes(
            max_seq_len=(max_seq_len, 2),
            max_batch=(max_batch, 1),
            page_size=(page_size, 1),
            num_pages=(num_pages, max_pages),
            max_step_tokens=(max_step_tokens, 1),
            max_prefixes=(max_prefixes, 0),
        )
        if not isinstance(checkpoint, Transformer):
            checkpoint = Transformer.from_checkpoint(
                checkpoint, device=device or "cpu", dtype=dtype
            )
        self.model, self.max_seq_len = checkpoint, max_seq_len
        config, embedding = checkpoint.config, checkpoint.embedding
        if max_seq_len > config.max_position_embeddings:
            expected = f"at most the model's {config.max_position_embeddings}"
            raise _refused("max_seq_len is out of range", max_seq_len, expected)
        self._cache = PagedCache(
            config, max_batch, max_seq_len, num_pages, page_size, embedding.dtype, embedding.device
        )
        self._prefixes = PrefixTree(self._cache, max_prefixes)
        self._scheduler = Scheduler(self._cache, self._prefixes, max_step_tokens)
        self._rotation = rotation_table(config, max_seq_len, embedding.device)
        self.batch_invariant = batch_invariant
        # Whether a pass is launched before the tokens of the one before it are read.
        self._is_ahead = embedding.is_cuda
        self._launched: _Launched | None = None
        self._active: dict[int, Running] = {}
        self._next_id = itertools.count()
        # Prompts just finished stay in the tree, so that one added after another shares with it.
        self._finished = deque(maxlen=max_batch)

    @property
    def counts(self) -> Counts:
        """Work done so far."""
        return self._scheduler.counts

    @property
    def idle(self) -> bool:
        """Whether no sequence is waiting or running."""
        return not self._active

    def is_idle(self) -> bool:
        """As `idle`."""
        return self.idle

    def add(self, tokens: Sequence[int], max_tokens: int | None = None) -> int:
        """Queue a prompt; returns the sequence's id.

        Args:
            tokens: Ids of the prompt, at least one.
            max_tokens: New tokens after which the sequence ends; by default all that fit.

        Raises:
            ConfigError: Prompt and new tokens do not fit, or there are none (E-CONFIG-GENERATE).
            TokenizerError: An id is outside the vocabulary (E-TOKENIZER-VOCAB).
        """
        prompt = self._checked(tokens, max_tokens)
        seq_id = next(self._next_id)
        room = self.max_seq_len - len(prompt)
        sequence = Running(
            seq_id,
            prompt,
            len(prompt),
            room if max_tokens is None else max_tokens,
            self._prefixes.add(prompt),
        )
        self._active[seq_id] = sequence
        self._scheduler.waiting.append(sequence)
        return seq_id

    def add_request(self, tokens: Sequence[int], max_tokens: int = 256) -> int:
        """As `add`."""
        return self.add(tokens, max_tokens)

    def step(self) -> tuple[Tensor, list[int]] | None:
        """Logits of the next token of every sequence that has come to one.

        Prompts are prefilled along the way. Each sequence returned must be answered by `update`
        before it goes on; the others go on without it.

        Returns:
            float32 [B, vocab] and B sequence ids; None when idle.

        Raises:
            StateError: Every sequence that could go on awaits its `update` (E-STATE-SEQUENCE).
        """
        made = self._next_pass()
        if made is not None:
            return made[0], [sequence.seq_id for sequence in made[1]]
        if self._active:
            raise StateError(
                "every sequence awaits the token chosen for it",
                found=f"{len(self._active)} sequences",
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
        sequence = self._active.get(seq_id)
        if sequence is None or sequence.is_answered:
            raise _not_there(seq_id, "awaits no token")
        self._check_vocabulary([token])
        self._answer(sequence, int(token))
        if finished and seq_id in self._active:
            self._end(sequence)

    def cancel(self, seq_id: int) -> None:
        """End a sequence, waiting or running, and free what it has.

        Raises:
            StateError: There is no such sequence, or it has ended (E-STATE-SEQUENCE).
        """
        if seq_id not in self._active:
            raise _not_there(seq_id, "is not there")
        self._end(self._active[seq_id])

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 256,
        temperature: float = 0.0,
        *,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        stop_ids: Iterable[int] = (),
    ) -> list[list[int]]:
        """New tokens of every prompt, in their order; a stop id ends one and is left out.

        Prompt i is sampled with seed `seed + i`. All prompts are checked before any is begun.

        Raises:
            ConfigError: As `add` and `Sampling`, or the generator is not idle (E-CONFIG-GENERATE).
            TokenizerError: As `add`.
            CheckpointError: As `complete`.
        """
        stops = frozenset(stop_ids)
        requests = [
            Request(prompt, max_tokens, Sampling(temperature, top_p, top_k, seed + i), stops)
            for i, prompt in enumerate(prompts)
        ]
        for request in requests:
            self.check(request)
        done = sorted(self.complete(requests), key=lambda completion: completion.index)
        return [completion.tokens for completion in done]

    def check(self, request: Request) -> None:
        """Refuse what `complete` would refuse.

        Raises:
            ConfigError: As `add`.
            TokenizerError: As `add`.
        """
        self._checked(request.tokens, request.max_tokens)

    def complete(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Completions of requests as they end, in any order.

        Requests are taken as there is room, `max_batch` ahead of those that run.

        Raises:
            ConfigError: As `add`, or the generator is not idle (E-CONFIG-GENERATE).
            TokenizerError: As `add`.
            CheckpointError: The logits are not finite (E-CHECKPOINT-LOGITS).
        """
        if not self.idle:
            raise _refused("other sequences are under way", f"{len(self._active)}", "none")
        source, taken = enumerate(requests), {}
        ahead = 2 * len(self._cache.tables)
        try:
            while True:
                for index, request in itertools.islice(source, ahead - len(taken)):
                    seq_id = self.add(request.tokens, request.max_tokens)
                    taken[seq_id] = index, request
                if not taken:
                    return
                yield from self._advance(taken)
        finally:
            self._launched = None
            for seq_id in taken.keys() & self._active.keys():
                self.cancel(seq_id)

    def _advance(self, taken: dict[int, tuple[int, Request]]) -> list[Completion]:
        """One pass of the requests under way; those that end leave `taken`."""
        before, made = self._launched, self._next_pass()
        assert before is not None or made is not None
        self._launched = None if made is None else self._choose(*made, taken)
        if not self._is_ahead:
            before, self._launched = self._launched, None
        return [] if before is None else self._read(before, taken)

    def _choose(
        self, logits: Tensor, sequences: list[Running], taken: dict[int, tuple[int, Request]]
    ) -> _Launched:
        """Choose the sequences' tokens, on the device; those whose last it is end."""
        samplings = [taken[sequence.seq_id][1].sampling for sequence in sequences]
        places = [len(sequence.tokens) for sequence in sequences]
        launched = _Launched(Arriving(choose(logits, samplings, places)), sequences, places)
        for sequence in sequences:
            self._answer(sequence, _UNKNOWN)
        return launched

    def _read(self, launched: _Launched, taken: dict[int, tuple[int, Request]]) -> list[Completion]:
        """Give sequences the tokens of a pass; those that have ended leave `taken`."""
        done = []
        tokens = checked(launched.ids.tolist())
        for sequence, place, token in zip(launched.sequences, launched.places, tokens):
            if sequence.seq_id not in taken:
                continue
            index, request = taken[sequence.seq_id]
            sequence.tokens[place] = token
            num_new = place + 1 - sequence.num_prompt
            if token in request.stop_ids:
                new = sequence.tokens[sequence.num_prompt : place]
                done.append(Completion(index, new, "stop", token))
            elif num_new == sequence.max_tokens:
                new = sequence.tokens[sequence.num_prompt :]
                done.append(Completion(index, new, "length", None))
            else:
                continue
            del taken[sequence.seq_id]
            if sequence.seq_id in self._active:
                self._end(sequence)
        return done

    def _next_pass(self) -> tuple[Tensor, list[Running]] | None:
        """Logits of the next tokens, and whose they are; None when no sequence can go on."""
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
        context = self.model.step(self._cache, chunks, self.batch_invariant)
        ids = on_device(np.concatenate(tokens).astype(np.int64), device)
        if self._launched is not None:
            self._launched.fill(ids, wanted)
        return self.model.extend(
            ids,
            context,
            self._rotation[context.positions],
            on_device(np.array([row for row, _ in wanted], np.int64), device),
        )

    def _answer(self, sequence: Running, token: int) -> None:
        """Give a sequence its next token; with its last allowed one it ends."""
        sequence.tokens.append(token)
        sequence.is_answered = True
        if sequence.num_generated >= sequence.max_tokens:
            self._end(sequence)

    def _end(self, sequence: Running) -> None:
        self._scheduler.remove(sequence)
        del self._active[sequence.seq_id]
        if len(self._finished) == self._finished.maxlen:
            self._prefixes.remove(self._finished.popleft())
        self._finished.append(sequence.end)

    def _checked(self, tokens: Sequence[int], max_tokens: int | None) -> list[int]:
        """A prompt's ids, which fit."""
        prompt = [operator.index(token) for token in tokens]
        new = 1 if max_tokens is None else max_tokens
        if not prompt:
            raise _refused("the prompt is empty", 0, "at least one token")
        if new < 1:
            raise _refused("max_tokens is out of range", new, "at least 1")
        if len(prompt) + new > self.max_seq_len:
            found = f"{len(prompt)} and {new} tokens"
            expected = f"at most {self.max_seq_len} (max_seq_len)"
            raise _refused("prompt and new tokens do not fit a sequence", found, expected)
        self._check_vocabulary(prompt)
        return prompt

    def _check_vocabulary(self, ids: list[int]) -> None:
        size = self.model.config.vocab_size
        outside = [token for token in ids if not 0 <= token < size]
        if outside:
            raise TokenizerError(
                "a token id is outside the model's vocabulary",
                found=outside[0],
                expected=f"0 to {size - 1}",
                do="use the tokenizer the model was trained with",
                code="E-TOKENIZER-VOCAB",
            )


def _check_sizes(**sizes: tuple[int, int]) -> None:
    for name, (value, least) in sizes.items():
        if value < least:
            raise _refused(f"{name} is out of range", value, f"at least {least}")


def _refused(what: str, found: object, expected: str) -> ConfigError:
    return ConfigError(what, found=found, expected=expected, code="E-CONFIG-GENERATE")


def _not_there(seq_id: int, what: str) -> StateError:
    return StateError(f"sequence {seq_id} {what}", code="E-STATE-SEQUENCE")
