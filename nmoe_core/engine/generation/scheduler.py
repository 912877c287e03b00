"""Selects the sequences of each pass, and their number of tokens.

Sequences are admitted in order of arrival, if there is a free slot and there are enough pages to
prefill them. While a sequence waits for a shared prefix, later sequences may start. In each pass,
every running sequence whose next token is known decodes one step; prompts use the remaining token
budget in order of arrival. If pages run out, cached prefixes are dropped first. Then the sequence
that arrived last returns to the queue, and is recomputed later. The oldest sequence always runs to
its end, so all sequences finish.
"""

import itertools
from bisect import insort
from collections import deque
from dataclasses import dataclass, field

from nmoe_core.engine.generation.cache import PagedCache
from nmoe_core.engine.generation.prefixes import Node, PrefixTree
from nmoe_core.engine.generation.step import Chunk


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and its tokens so far.

    `tokens` are the prompt and all later tokens; the first `num_cached` have keys and values.
    `is_answered` is false after a pass computed logits, until the next token is chosen.
    """

    seq_id: int
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    end: Node
    slot: int = -1
    num_cached: int = 0
    is_answered: bool = True
    logprobs: list[float] = field(default_factory=list)

    @property
    def num_missing(self) -> int:
        """Number of tokens without keys and values."""
        return len(self.tokens) - self.num_cached


@dataclass(slots=True)
class Counts:
    """Work done so far; all counts except `preemptions` and `passes` are tokens."""

    prefilled: int = 0
    reused: int = 0
    decoded: int = 0
    preemptions: int = 0
    passes: int = 0


@dataclass(frozen=True, slots=True)
class Planned:
    """A sequence's part of a pass; `makes` is the prefix to store after the pass, if any."""

    sequence: Sequence
    chunk: Chunk
    makes: Node | None = None


class Scheduler:
    """Waiting and running sequences over one cache."""

    def __init__(self, cache: PagedCache, prefixes: PrefixTree, max_step_tokens: int) -> None:
        self.cache = cache
        self.prefixes = prefixes
        self.max_step_tokens = max_step_tokens
        self.sequences: dict[int, Sequence] = {}
        self.counts = Counts()
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._next_id = itertools.count()
        # Recently finished prompts stay in the tree, so that later prompts can share their prefix.
        self._finished: deque[Node] = deque(maxlen=len(cache.tables))

    def add(self, prompt: list[int], max_tokens: int) -> int:
        """Queue a prompt; returns the sequence id."""
        end = self.prefixes.add(prompt)
        seq_id = next(self._next_id)
        sequence = Sequence(seq_id, prompt, len(prompt), max_tokens, end)
        self.sequences[seq_id] = sequence
        self._waiting.append(sequence)
        return seq_id

    def answer(self, sequence: Sequence, token: int) -> None:
        """Set the next token of a sequence; it ends after its last allowed token."""
        sequence.tokens.append(token)
        sequence.is_answered = True
        if len(sequence.tokens) - sequence.num_prompt >= sequence.max_tokens:
            self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        """Remove a waiting or running sequence; does nothing if it has ended already."""
        if self.sequences.pop(sequence.seq_id, None) is None:
            return
        self._withdraw(sequence)
        if len(self._finished) == self._finished.maxlen:
            self.prefixes.remove(self._finished.popleft())
        self._finished.append(sequence.end)

    def plan(self) -> list[Planned]:
        """Parts of the next pass, single tokens first; empty if no sequence can continue."""
        self._admit()
        budget = self.max_step_tokens
        planned = []
        for sequence in list(self._running):
            if sequence.slot < 0 or not sequence.is_answered:
                continue
            if (part := self._part(sequence, budget)) is not None:
                # Single tokens are not limited: every sequence that can decode does.
                budget -= part.chunk.count if part.chunk.count > 1 else 0
                planned.append(part)
        planned.sort(key=lambda part: part.chunk.count > 1)
        return planned

    def commit(self, planned: list[Planned]) -> None:
        """Record that a pass was run."""
        self.counts.passes += 1
        for part in planned:
            sequence = part.sequence
            count = part.chunk.count
            is_prompt = sequence.num_cached < sequence.num_prompt
            self.counts.prefilled += count if is_prompt else 0
            self.counts.decoded += 0 if is_prompt else count
            sequence.num_cached += count
            if part.makes is not None:
                self.prefixes.keep(part.makes, sequence.slot)
            sequence.is_answered = sequence.num_missing > 0

    def _admit(self) -> None:
        """Start waiting sequences in order of arrival, as far as possible."""
        if not self._waiting or not self.cache.free_slots:
            return
        being_made = {node for sequence in self._running for node in self._to_make(sequence)}
        # Only look at the head of the queue; otherwise the cost of a pass would grow with the
        # queue.
        for sequence in self._waiting[: 2 * len(self.cache.tables)]:
            if not sequence.is_answered:
                continue
            kept = self.prefixes.longest_kept(sequence.end)
            length = 0 if kept is None else kept.length
            # Wait for a prefix that a running sequence computes, instead of computing it twice.
            if being_made.intersection(self.prefixes.to_make(sequence.end, length)):
                continue
            if not self._has_room(sequence, length) or not self._start(sequence):
                return
            being_made.update(self._to_make(sequence))

    def _has_room(self, sequence: Sequence, start: int) -> bool:
        """Whether there are enough pages for this sequence in addition to the running sequences."""
        if not self._running:
            return True
        needed = self.cache.pages_for(len(sequence.tokens) + 1) - start // self.cache.page_size
        # One page per running sequence is reserved for its next tokens.
        needed += len(self._running)
        while len(self.cache.free_pages) < needed and self.prefixes.drop(only_unused=True):
            pass
        return len(self.cache.free_pages) >= needed

    def _start(self, sequence: Sequence) -> bool:
        """Give the sequence a slot that starts with its longest cached prefix."""
        while True:
            kept = self.prefixes.longest_kept(sequence.end)
            slot = self.cache.open(None if kept is None else self.prefixes.use(kept))
            if slot is not None:
                break
            # If no sequence runs, only cached prefixes use pages.
            if self._running or not self.prefixes.drop():
                return False
        self._waiting.remove(sequence)
        insort(self._running, sequence, key=lambda other: other.seq_id)
        sequence.slot = slot
        sequence.num_cached = 0 if kept is None else kept.length
        self.counts.reused += sequence.num_cached
        return True

    def _to_make(self, sequence: Sequence) -> list[Node]:
        # The last token of a prompt is always computed: the first answer needs its logits.
        if sequence.num_cached >= sequence.num_prompt - 1:
            return []
        return self.prefixes.to_make(sequence.end, sequence.num_cached)

    def _part(self, sequence: Sequence, budget: int) -> Planned | None:
        """Next work of a running sequence; None if it must wait."""
        count = sequence.num_missing
        makes = None
        if count > 1:
            count = min(count, budget)
            # Rings keep only the last positions, so the pass must end where the prefix ends.
            stops = self._to_make(sequence)
            if stops and stops[0].length - sequence.num_cached <= count:
                count = stops[0].length - sequence.num_cached
                makes = stops[0]
        if count == 0 or not self._reserve(sequence, sequence.num_cached + count):
            return None
        return Planned(sequence, Chunk(sequence.slot, sequence.num_cached, count), makes)

    def _reserve(self, sequence: Sequence, length: int) -> bool:
        """Reserve pages for `length` positions; takes pages from other sequences if too few are
        free."""
        while not self.cache.reserve(sequence.slot, length):
            if self.prefixes.drop():
                continue
            youngest = self._running[-1]
            self.counts.preemptions += 1
            self._withdraw(youngest)
            # Return the sequence to the queue, in order of arrival. It keeps its tokens, but loses
            # its pages.
            insort(self._waiting, youngest, key=lambda other: other.seq_id)
            if youngest is sequence:
                return False
        return True

    def _withdraw(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue; or remove a running sequence and free its pages."""
        if sequence.slot < 0:
            self._waiting.remove(sequence)
            return
        self.cache.close(sequence.slot)
        self._running.remove(sequence)
        sequence.slot = -1


def wanted_rows(planned: list[Planned]) -> list[tuple[int, Sequence]]:
    """Rows of a pass whose logits are needed, with their sequences."""
    wanted = []
    row = -1
    for part in planned:
        row += part.chunk.count
        if part.chunk.stop == len(part.sequence.tokens):
            wanted.append((row, part.sequence))
    return wanted
