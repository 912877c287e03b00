"""Which beginnings the prompts at hand share, and what the cache keeps of them.

A radix tree over the prompts of waiting, running and just finished requests. A beginning is worth
keeping where two prompts part, at least 16 tokens after the last such place. The first sequence
that reaches it stops there, and the cache keeps its keys and values, the rings of windowed blocks
included. The others wait for that and go on from there. A prompt's last token is left out, because
a sequence must compute a token to have logits; so equal prompts share all but the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from nmoe_core.engine.generation.cache import PagedCache, Prefix

MIN_SHARED_TOKENS = 16


@dataclass(slots=True, eq=False)
class Node:
    """End of a stretch of tokens that every prompt below it has.

    `length` counts tokens from the root, `ends` prompts that stop here.
    """

    tokens: np.ndarray
    length: int
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    ends: int = 0
    kept: Prefix | None = None
    last_used: int = 0

    @property
    def is_parting(self) -> bool:
        """Whether prompts part here, or equal ones end."""
        return len(self.children) + self.ends > 1


class PrefixTree:
    """Beginnings of prompts, and the kept ones among them.

    Args:
        cache: Keeps what the beginnings left.
        max_kept: Most beginnings kept at once; the one used longest ago goes first.
    """

    def __init__(self, cache: PagedCache, max_kept: int) -> None:
        self._cache = cache
        self._max_kept = max_kept
        self.root = Node(np.empty(0, np.int64), 0, None)
        self.kept: list[Node] = []
        self._clock = 0

    def add(self, prompt: Sequence[int]) -> Node:
        """Enter a prompt; returns the node that `remove` takes."""
        node, rest = self.root, np.asarray(prompt[:-1], np.int64)
        while len(rest):
            child = node.children.get(int(rest[0]))
            if child is None:
                child = Node(rest, node.length + len(rest), node)
                node.children[int(rest[0])] = child
            shared = _num_equal(child.tokens, rest)
            if shared < len(child.tokens):
                child = _split(child, shared)
            node, rest = child, rest[shared:]
        node.ends += 1
        return node

    def remove(self, node: Node) -> None:
        """Take a prompt out again."""
        node.ends -= 1
        self._prune(node)

    def kept_length(self, end: Node) -> int:
        """Tokens of the longest kept beginning of the prompt that ends at `end`."""
        return max((node.length for node in _path(end) if node.kept is not None), default=0)

    def longest_kept(self, end: Node) -> Prefix | None:
        """What is kept of the longest beginning of the prompt that ends at `end`."""
        kept = [node for node in _path(end) if node.kept is not None]
        if not kept:
            return None
        self._clock += 1
        kept[-1].last_used = self._clock
        return kept[-1].kept

    def to_make(self, end: Node, beyond: int) -> list[Node]:
        """Beginnings of a prompt that are worth keeping, longer than `beyond`, shortest first."""
        if self._max_kept == 0:
            return []
        wanted, last = [], 0
        for node in _path(end):
            if node.kept is None and not (
                node.is_parting and node.length >= last + MIN_SHARED_TOKENS
            ):
                continue
            last = node.length
            if node.kept is None and node.length > beyond:
                wanted.append(node)
        return wanted

    def keep(self, node: Node, slot: int) -> bool:
        """Keep what the sequence in `slot` has, which is the beginning that ends at `node`."""
        while len(self.kept) >= self._max_kept:
            self.drop_oldest()
        node.kept = self._cache.keep_prefix(slot, node.length)
        if node.kept is None:
            return False
        self._clock += 1
        node.last_used = self._clock
        self.kept.append(node)
        return True

    def drop_oldest(self) -> bool:
        """Give back the beginning used longest ago; False when there is none."""
        if not self.kept:
            return False
        self._drop(min(self.kept, key=lambda node: node.last_used))
        return True

    def drop_unused(self) -> bool:
        """Give back one beginning that no prompt at hand has; False when there is none."""
        unused = [node for node in self.kept if not (node.children or node.ends)]
        if not unused:
            return False
        self._drop(min(unused, key=lambda node: node.last_used))
        return True

    def _drop(self, node: Node) -> None:
        self.kept.remove(node)
        assert node.kept is not None
        self._cache.drop_prefix(node.kept)
        node.kept = None
        self._prune(node)

    def _prune(self, node: Node) -> None:
        while node.parent is not None and not (node.children or node.ends or node.kept):
            del node.parent.children[int(node.tokens[0])]
            node = node.parent


def _path(end: Node) -> Iterator[Node]:
    """Nodes from below the root to `end`."""
    nodes = []
    node: Node | None = end
    while node is not None:
        nodes.append(node)
        node = node.parent
    return reversed(nodes[:-1])


def _split(node: Node, shared: int) -> Node:
    """Put a node after the first `shared` tokens of `node`, and return it."""
    assert node.parent is not None
    upper = Node(node.tokens[:shared], node.length - len(node.tokens) + shared, node.parent)
    node.parent.children[int(node.tokens[0])] = upper
    node.tokens, node.parent = node.tokens[shared:], upper
    upper.children[int(node.tokens[0])] = node
    return upper


def _num_equal(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common beginning."""
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size
