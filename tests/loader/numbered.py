"""A corpus whose tokens say where they are, and what loaders read of it, by replay."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from loader import DeterministicLoader, LoaderPlan

FIRST = 2000  # the token of the first position; padding has another
VOCAB = 100_000
Document = tuple[str, int]  # source, number


def number(tree: Any, **sizes: int) -> None:
    """Sources of these sizes; every token of all of them is another."""
    at = FIRST
    for name, size in sizes.items():
        manifest = tree.add(name, size, vocab_size=VOCAB)
        for entry in json.loads(manifest.read_text())["shards"]:
            path = manifest.parent / entry["path"]
            np.save(path, np.arange(at, at + entry["num_tokens"], dtype="<u4"))
            at += entry["num_tokens"]


def documents(manifest: Path) -> list[np.ndarray]:
    """The tokens of each document, in the order of the manifest."""
    found = []
    for entry in json.loads(manifest.read_text())["shards"]:
        tokens = np.load(manifest.parent / entry["path"])
        index = np.fromfile(manifest.parent / entry["index_path"], "<u8", offset=32).reshape(-1, 2)
        found += [tokens[start:end] for start, end in index.astype(int)]
    return found


def owners(tree: Any, *names: str) -> dict[int, Document]:
    """The document of each token."""
    return {
        token: (name, i)
        for name in names
        for i, tokens in enumerate(documents(tree.root / name / "train" / "manifest.json"))
        for token in tokens.tolist()
    }


def rows_read(
    plan: LoaderPlan, starts: list[tuple[int, int]], stop: int, state: Any = None
) -> Iterator[tuple[int, np.ndarray]]:
    """Number and inputs of each sequence before step `stop`, in any order, as ranks read them.
    starts: steps at which a process begins, each from the state of the one before it, and the
    number of its ranks."""
    ends = [*(step for step, _ in starts[1:]), stop]
    for (_, ranks), end in zip(starts, ends):
        states = []
        for rank in range(ranks):
            with DeterministicLoader(plan, rank, ranks, backend="numpy", form="batch") as loader:
                if state is not None:
                    loader.load_state_dict(state)
                while loader.step < end:
                    batch = loader.next()
                    yield from zip(batch.sequence_index.tolist(), batch.inputs.copy())
                states.append(loader.state_dict())
        state = states[-1]


def counted(rows: Iterator[tuple[int, np.ndarray]], owner: dict[int, Document]) -> dict[Any, Any]:
    """Tokens of each document in each sequence that has any: {document: {sequence: tokens}}."""
    found: dict[Any, Any] = defaultdict(lambda: defaultdict(int))
    for sequence, inputs in rows:
        for token in inputs.tolist():
            if token in owner:
                found[owner[token]][sequence] += 1
    return found
