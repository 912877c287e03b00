"""Finds prefixes that prompts share, and manages their entries in the cache.

A radix tree holds the prompts of waiting, running and recently finished requests. A prefix is worth
keeping if two prompts diverge at its end, at least 16 tokens after the previous point of
divergence. When the first sequence reaches this point, the cache stores its keys and values, and
other sequences start from them. The last token of a prompt is never part of a prefix, because a
sequence must compute at least one token to get logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from nmoe_core.engine.generation.cache import PagedCache, Prefix

MIN_SHARED_TOKENS = 16


@dataclass(slots=True, eq=False)
class Node:
    """A node of the radix tree: the end of a run of tokens that all prompts below it share.

    `length` is the number of tokens from the root, `ends` the number of prompts that end here.
    """

    tokens: np.ndarray
    length: int
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    ends: int = 0


class PrefixTree:
    """The prefixes of prompts; `kept` holds the cached prefixes, least recently used first."""

    def __init__(self, cache: PagedCache, max_kept: int) -> None:
        self._cache = cache
        self._max_kept = max_kept
        self.root = Node(np.empty(0, np.int64), 0, None)
        self.kept: dict[Node, Prefix] = {}

    def add(self, prompt: Sequence[int]) -> Node:
        """Add a prompt; return its node, for `remove`."""
        node = self.root
        rest = np.asarray(prompt[:-1], np.int64)
        while len(rest):
            child = node.children.get(int(rest[0]))
            if child is None:
                child = Node(rest, node.length + len(rest), node)
                node.children[int(rest[0])] = child
            size = min(len(child.tokens), len(rest))
            differs = np.flatnonzero(child.tokens[:size] != rest[:size])
            shared = int(differs[0]) if len(differs) else size
            if shared < len(child.tokens):
                child = _split(child, shared)
            node = child
            rest = rest[shared:]
        node.ends += 1
        return node

    def remove(self, node: Node) -> None:
        """Remove a prompt."""
        node.ends -= 1
        self._prune(node)

    def longest_kept(self, end: Node) -> Node | None:
        """The longest cached prefix of the prompt that ends at `end`."""
        return next((node for node in _upwards(end) if node in self.kept), None)

    def use(self, node: Node) -> Prefix:
        """The cache entry of a prefix; marks it as most recently used."""
        self.kept[node] = self.kept.pop(node)
        return self.kept[node]

    def to_make(self, end: Node, beyond: int) -> list[Node]:
        """Prefixes of a prompt that are worth keeping and longer than `beyond`, shortest first."""
        if self._max_kept == 0:
            return []
        wanted = []
        last = 0
        for node in reversed(list(_upwards(end))):
            is_kept = node in self.kept
            is_parting = len(node.children) + node.ends > 1
            if is_kept or (is_parting and node.length >= last + MIN_SHARED_TOKENS):
                last = node.length
                if not is_kept and node.length > beyond:
                    wanted.append(node)
        return wanted

    def keep(self, node: Node, slot: int) -> bool:
        """Store the keys and values of the sequence in `slot`, which has reached `node`, as a
        prefix."""
        while len(self.kept) >= self._max_kept:
            self.drop()
        prefix = self._cache.keep_prefix(slot, node.length)
        if prefix is not None:
            self.kept[node] = prefix
        return prefix is not None

    def drop(self, only_unused: bool = False) -> bool:
        """Free the least recently used prefix; with `only_unused`, only a prefix without prompts.

        Returns False if there is no such prefix.
        """
        for node in self.kept:
            if not (only_unused and (node.children or node.ends)):
                self._cache.drop_prefix(self.kept.pop(node))
                self._prune(node)
                return True
        return False

    def _prune(self, node: Node) -> None:
        while node.parent is not None and not (node.children or node.ends or node in self.kept):
            del node.parent.children[int(node.tokens[0])]
            node = node.parent


def _upwards(node: Node) -> Iterator[Node]:
    """The nodes from `node` up to the root, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _split(node: Node, shared: int) -> Node:
    """Split `node` after its first `shared` tokens; return the new node."""
    assert node.parent is not None
    upper = Node(node.tokens[:shared], node.length - len(node.tokens) + shared, node.parent)
    node.parent.children[int(node.tokens[0])] = upper
    node.tokens = node.tokens[shared:]
    node.parent = upper
    upper.children[int(node.tokens[0])] = node
    return upper
