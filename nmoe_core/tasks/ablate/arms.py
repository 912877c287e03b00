"""The texts of an ablation: three arms with equal tokens, and evaluation texts that no grader was
fitted on.

All arms take the same number of tokens from each source, so a difference between arms is not an
effect of sources. Evaluation documents are new to the graders: no evaluation document, and no exact
or near copy of one, has a label in `train` or `val`, on which graders are fitted, chosen and
calibrated. Arms exclude evaluation documents and their near copies. Copies are detected by the
first 512 tokens. Memory: the lengths of all documents, 512 tokens of each, and the drawn texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loader.files.format import load_manifest
from nmoe_core.base.errors import CurationError
from nmoe_core.config.run import Run
from nmoe_core.labels.documents import JsonlTexts
from nmoe_core.labels.label_files import read_label_file
from nmoe_core.prep.mixture import run_sources
from nmoe_core.shards.documents import ShardFile, shard_files
from nmoe_core.tasks.ablate.documents import (
    COPY_TOKENS,
    EVAL_BYTES,
    MAX_TOKENS,
    FileDocuments,
    text_of,
)
from nmoe_core.tasks.selection.outcome import outcome_of
from nmoe_core.text.near_copies import near_copies
from nmoe_core.text.tokenizer import load_tokenizer

_GRADER_SPLITS = ("train", "val")  # test labels are used for reports only
ARMS = ("kept", "random", "dropped")


@dataclass(frozen=True, slots=True)
class _Documents:
    """All documents of a source, in the order of its shards."""

    documents: FileDocuments
    kept: np.ndarray  # bool [N]
    lengths: np.ndarray  # int64 [N], limit of the tokens that an arm takes
    labelled: np.ndarray  # bool [N]: whether a document's text has a label in train or val

    def tokens(self, number: int, limit: int = MAX_TOKENS) -> np.ndarray:
        """The first tokens of a document, without EOS."""
        return self.documents.tokens(number, limit)


class Texts:
    """The documents of a run; evaluation texts and arms are drawn from them.

    Args:
        run: A run whose documents are selected, or graded.
        count: Number of documents per evaluation set.
        own: A JSONL file with the user's evaluation texts, or None.

    Attributes:
        evaluation: Texts of each set by its name: `kept`, `all`, and `own` if given.
        sources: The source of each text of an evaluation set; the user's texts have one source.
        left_out: Number of texts of `own` that are excluded because a grader was fitted, chosen or
            calibrated on them.

    Raises:
        CurationError: A set has fewer than ten documents unseen by graders (E-CURATION-ABLATE).
        FormatError, LabelError: Documents, labels or decisions are missing or damaged.
    """

    def __init__(self, run: Run, count: int, own: Path | None = None) -> None:
        self._run = run
        self._tokenizer = load_tokenizer(run.tokenizer)
        names = [one.name for one in run_sources(run)]
        paths = [run.tree.merged_labels(split) for split in _GRADER_SPLITS]
        ids: set[str] = set()
        for path in paths:
            if path.is_file():
                ids.update(row["doc_id"] for row in read_label_file(path)[1])
        self._sources = {name: self._read(name, ids) for name in names}
        self._seen: list[np.ndarray] = []
        for documents in self._sources.values():
            for i in np.flatnonzero(documents.labelled).tolist():
                self._seen.append(documents.tokens(i, COPY_TOKENS))
        self._held: dict[str, set[int]] = {name: set() for name in names}
        self._eval_tokens: list[np.ndarray] = []
        self.left_out = 0
        drawn = {name: self._evaluation(name, count) for name in ("kept", "all")}
        if own is not None:
            drawn["own"] = [("", text) for text in self._own(own)]
        self.evaluation = {name: [text for _, text in found] for name, found in drawn.items()}
        self.sources = {name: [source for source, _ in found] for name, found in drawn.items()}
        for name, texts in self.evaluation.items():
            if len(texts) < 10:
                raise CurationError(
                    "too few documents that no grader was fitted on",
                    where=own if name == "own" else run.path,
                    found=f"{len(texts)} for the evaluation set {name}",
                    expected="at least 10",
                    do="label fewer documents, or prepare more",
                    code="E-CURATION-ABLATE",
                )
        self._free = {name: self._without_copies(name) for name in names}

    def arms(self, num_tokens: int, seed: int) -> dict[str, list[bytes]]:
        """The texts of each arm, `num_tokens` tokens per arm, drawn by the seed.

        Raises CurationError if the sources have fewer tokens for an arm (E-CURATION-ABLATE).
        """
        quotas = self._quotas(num_tokens)
        return {arm: self._draw(arm, quotas, seed) for arm in ARMS}

    def share_read(self, arm: str, num_tokens: int) -> float:
        """The share of an arm's available tokens that one seed draws."""
        numbers = {name: self._numbers(arm, name) for name in self._sources}
        return num_tokens / sum(
            int(self._sources[s].lengths[of].sum()) for s, of in numbers.items()
        )

    def _read(self, source: str, labelled: set[str]) -> _Documents:
        files: list[ShardFile] = []
        kept: list[np.ndarray] = []
        for shard in self._run.tree.shards(source, self._run.config.prep.num_shards):
            files += shard_files(self._run.tree.data, load_manifest(shard.manifest))
            kept.append(outcome_of(self._run, shard).codes == 0)
        has_label = np.array([i in labelled for file in files for i in file.doc_ids()], np.bool_)
        digests = [digest for file in files for _, digest in file.ids()]
        seen = {digest for digest, is_seen in zip(digests, has_label) if is_seen and digest}
        same = np.array([digest in seen for digest in digests], np.bool_)
        documents = FileDocuments(files)
        lengths = np.minimum(documents.lengths, MAX_TOKENS)
        return _Documents(documents, np.concatenate(kept), lengths, has_label | same)

    def _evaluation(self, name: str, count: int) -> list[tuple[str, bytes]]:
        """Documents of an evaluation set with their sources: the same number from each source that
        has enough documents."""
        found: list[tuple[str, bytes]] = []
        share = -(-count // len(self._sources))
        for source, one in self._sources.items():
            rng = np.random.default_rng([self._run.loader.seed, len(name)])
            unseen = ~one.labelled & (one.kept if name == "kept" else True) & (one.lengths > 0)
            numbers = rng.permutation(np.flatnonzero(unseen))[: 2 * share].tolist()
            tokens = [one.tokens(i, COPY_TOKENS) for i in numbers]
            fresh = np.flatnonzero(~near_copies(tokens, self._seen))[:share].tolist()
            self._held[source] |= {numbers[k] for k in fresh}
            self._eval_tokens += [tokens[k] for k in fresh]
            texts = [text_of(tokens[k], self._tokenizer)[:EVAL_BYTES] for k in fresh]
            found += [(source, text) for text in texts if text]
        return found

    def _own(self, path: Path) -> list[bytes]:
        lines = JsonlTexts(path)
        texts = [lines.text(doc_id) for doc_id, _ in lines.rows]
        texts = [text for text in texts if text]
        tokens = [
            np.asarray(self._tokenizer.encode_long(t, COPY_TOKENS)[:COPY_TOKENS]) for t in texts
        ]
        fresh = np.flatnonzero(~near_copies(tokens, self._seen)).tolist()
        self.left_out = len(texts) - len(fresh)
        self._eval_tokens += [tokens[k] for k in fresh]
        return [texts[k].encode("utf-8", "replace")[:EVAL_BYTES] for k in fresh]

    def _without_copies(self, source: str) -> np.ndarray:
        """Which documents an arm may take: bool `[N]`."""
        one = self._sources[source]
        free = one.lengths > 0
        free[list(self._held[source])] = False
        numbers = np.flatnonzero(free)
        tokens = [one.tokens(i, COPY_TOKENS) for i in numbers.tolist()]
        free[numbers[near_copies(tokens, self._eval_tokens)]] = False
        return free

    def _numbers(self, arm: str, source: str) -> np.ndarray:
        one = self._sources[source]
        free = self._free[source]
        wanted = {"kept": one.kept, "random": True, "dropped": ~one.kept}[arm]
        return np.flatnonzero(free & wanted)

    def _quotas(self, num_tokens: int) -> dict[str, int]:
        """Tokens per source: equal, except for sources that have fewer tokens for an arm."""
        has = {
            name: min(int(one.lengths[self._numbers(arm, name)].sum()) for arm in ARMS)
            for name, one in self._sources.items()
        }
        if sum(has.values()) < num_tokens:
            raise CurationError(
                "too little text for arms of equal tokens",
                where=self._run.path,
                found=f"{sum(has.values())} tokens per arm",
                expected=f"{num_tokens} tokens",
                do="set a lower --tokens, or prepare more documents",
                code="E-CURATION-ABLATE",
            )
        quotas = {}
        left = num_tokens
        for k, name in enumerate(sorted(has, key=lambda name: has[name])):
            quotas[name] = min(has[name], left // (len(has) - k))
            left -= quotas[name]
        return quotas

    def _draw(self, arm: str, quotas: dict[str, int], seed: int) -> list[bytes]:
        texts: list[bytes] = []
        for source, quota in quotas.items():
            one = self._sources[source]
            numbers = self._numbers(arm, source)
            for i in np.random.default_rng([seed, 1]).permutation(numbers).tolist():
                if quota <= 0:
                    break
                tokens = one.tokens(i, min(MAX_TOKENS, quota))
                quota -= len(tokens)
                texts.append(text_of(tokens, self._tokenizer))
        return [texts[i] for i in np.random.default_rng([seed, 2]).permutation(len(texts))]
