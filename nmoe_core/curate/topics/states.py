"""Documents by states: their mean state after one block of the backbone, standardised.

A few dimensions of states are large in every document, so each is standardised by its mean and
deviation over a sample. Of the blocks at tenths of the depth, the one is taken whose topics of
`BLOCK_SAMPLE` documents have the highest silhouette; all other documents run only the blocks up to
it. Documents are read as heads read them. Their states are kept beside the topics of each shard, 4
bytes per dimension and document, so only new texts are computed; those in the heads' store are
copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.base.progress import Meter
from nmoe_core.config.tree import Tree
from nmoe_core.curate.topics.embed import BLOCK_DOCUMENTS, BLOCK_TOKENS, runs_within
from nmoe_core.curate.topics.model import fit_centroids, load_model_of, nearest_topics
from nmoe_core.shards.documents import ShardFile

if TYPE_CHECKING:
    from nmoe_core.engine import Transformer
    from nmoe_core.quality.heads.scores import Corpus
    from nmoe_core.quality.kept_states import KeptStates

METHOD = "states/1"
DOCUMENTS = 16_384  # of the sample, since the backbone reads them
BLOCK_SAMPLE = 2000  # documents on which the block is chosen
STORE = ".states"
_KEPT = 2**62  # bytes: another task's states are not deleted
Sample = Iterator[tuple[ShardFile, np.ndarray]]


class Fitted(NamedTuple):
    """The chosen block, and the mean and deviation of each dimension: float32 `[2, H]`."""

    block: int
    standard: np.ndarray


class StateTable:
    """Embeds documents by states.

    Args:
        backbone: Digest of the backbone.
        made_with: Fingerprints of how the backbone reads documents.
        tree: The run's tree. Its topic model, if `fitted` is not set, names the block.
        load: Loads the backbone and the corpus that it reads; called if states are missing.
    """

    method = METHOD

    def __init__(
        self,
        backbone: str,
        made_with: Fingerprints,
        tree: Tree,
        load: Callable[[], tuple[Transformer, Corpus]],
    ) -> None:
        self.backbone = backbone
        self.made_with = made_with
        self._tree = tree
        self._load = load

    @cached_property
    def fitted(self) -> Fitted:
        """The block and standard of the topic model. Raises as `load_model_of`."""
        model = load_model_of(self._tree.topic_model, "states")
        assert model.standard is not None
        return Fitted(model.header["block"], model.standard)

    def embed(self, file: ShardFile, spans: np.ndarray) -> Iterator[np.ndarray]:
        """Yield unit rows of documents, float32 `[N, H]`; zero for a document without text or with
        states that are not finite. Raises HeadError if more than a few are not finite
        (E-HEAD-NONFINITE)."""
        lengths = spans[:, 1] - spans[:, 0]
        for run in runs_within(lengths, BLOCK_TOKENS, BLOCK_DOCUMENTS):
            yield standardised(self.states(file, spans[run]), self.fitted.standard)

    def states(self, file: ShardFile, spans: np.ndarray) -> np.ndarray:
        """Mean states after the chosen block, float32 `[N, H]`; zeros and errors as for `embed`."""
        from nmoe_core.quality.kept_states import KeptStates

        directory = self._tree.shard_of(file.rel).with_topics / STORE
        # Of no other block: with a limit of 0 bytes, its states are deleted.
        own = KeptStates(self._backbone, directory, 0, [self.fitted.block])
        return self._pooled(own, file, spans, self._of_heads)[:, 0]

    def fit(self, sampled: Callable[[int], Sample], num_topics: int, seed: int) -> dict[str, float]:
        """Choose the block and compute the standard, on `sampled(most documents)`; return the
        silhouette of the topics of each block."""
        found = [self._pooled(self._of_heads, *one) for one in sampled(BLOCK_SAMPLE)]
        scores = silhouettes(np.concatenate(found), num_topics, seed)
        blocks = self._of_heads.blocks
        block = blocks[scores.index(max(scores))]
        self.fitted = Fitted(block, np.empty(0, np.float32))
        meter = Meter("states of the sample", None)
        rows = []
        for file, spans in sampled(DOCUMENTS):
            rows.append(self.states(file, spans))
            meter.add(len(spans))
        self.fitted = Fitted(block, standard_of(np.concatenate(rows)))
        return dict(zip(map(str, blocks), scores))

    @cached_property
    def _loaded(self) -> tuple[Transformer, Corpus]:
        return self._load()

    @property
    def _backbone(self) -> Transformer:
        return self._loaded[0]

    @cached_property
    def _of_heads(self) -> KeptStates:
        """The heads' store, with the states after all blocks to choose from."""
        from nmoe_core.quality.heads.shapes import probe_blocks
        from nmoe_core.quality.heads.train import FEATURES_DIR
        from nmoe_core.quality.kept_states import KeptStates

        blocks = probe_blocks(self._backbone.config.num_hidden_layers)
        return KeptStates(self._backbone, self._tree.heads / FEATURES_DIR, _KEPT, blocks)

    def _pooled(
        self, kept: KeptStates, file: ShardFile, spans: np.ndarray, other: KeptStates | None = None
    ) -> np.ndarray:
        """Mean states after each block of a store, float32 `[N, blocks, H]`."""
        import torch

        from nmoe_core.quality.heads.scores import DocumentTokens, as_seen, one_thread

        corpus = self._loaded[1]
        how = corpus.eos_token_id, corpus.max_ctx, corpus.model
        has_text = spans[:, 1] - spans[:, 0] > 1
        texts = [file.tokens[start : end - 1] for start, end in spans[has_text].tolist()]
        seen = [as_seen(text, *how) for text in texts]
        documents = DocumentTokens([f"a document of {file.rel}"] * len(seen), seen)
        width = self._backbone.config.hidden_size
        rows = np.zeros((len(spans), len(kept.blocks), width), np.float32)
        with one_thread(), torch.inference_mode():
            if other is not None:
                kept.copy(other, documents)
            rows[has_text] = kept.pooled(documents)
        rows[~np.isfinite(rows).all(axis=(1, 2))] = 0
        return rows


def silhouettes(states: np.ndarray, num_topics: int, seed: int) -> list[float]:
    """The silhouette of k-means topics of each block's standardised states `[N, blocks, H]`; 0 if
    documents are too few for it."""
    from sklearn.metrics import silhouette_score
    from threadpoolctl import threadpool_limits

    states = states[states.any(axis=(1, 2))]
    if len(states) <= num_topics:
        return [0.0] * states.shape[1]
    found = []
    for block in np.moveaxis(states, 1, 0):
        rows = standardised(block, standard_of(block))
        topics = nearest_topics(rows, fit_centroids(rows, num_topics, seed))
        with threadpool_limits(limits=1):  # sums over several threads differ from run to run
            score = silhouette_score(rows, topics) if len(np.unique(topics)) > 1 else 0.0
        found.append(round(float(score), 3))
    return found


def standard_of(states: np.ndarray) -> np.ndarray:
    """Mean and deviation of each dimension over the rows that are not zero: float32 `[2, H]`."""
    states = states[states.any(axis=1)].astype(np.float64)
    if not len(states):
        return np.stack([np.zeros(states.shape[1]), np.ones(states.shape[1])]).astype(np.float32)
    deviation = states.std(axis=0)
    return np.stack([states.mean(axis=0), np.where(deviation > 0, deviation, 1)]).astype(np.float32)


def standardised(states: np.ndarray, standard: np.ndarray) -> np.ndarray:
    """Standardised rows of length 1: float32; zero rows stay zero."""
    wide = (states.astype(np.float64) - standard[0]) / standard[1]
    wide[~states.any(axis=1)] = 0
    norms = np.sqrt(np.sum(np.square(wide), axis=1, keepdims=True))
    return (wide / np.where(norms > 0, norms, 1)).astype(np.float32)
