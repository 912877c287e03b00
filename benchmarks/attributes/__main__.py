"""`python -m benchmarks.attributes DIRECTORY`: a table of what was planted and what was found.

DIRECTORY holds corpora as JSONL files, one of them `math_word_problems`, whose questions are the
evaluation, and one `poetry_chinese`. Peers run on the same documents with the same bands and rows.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from functools import reduce
from pathlib import Path

import numpy as np
import pyarrow as pa
from scipy.stats import binom

from benchmarks.attributes.peers import PEERS, survivors_of
from benchmarks.attributes.planted import Document, duplicates, plant, write_jsonl
from nmoe_core.attributes.contamination import Evaluations, contamination
from nmoe_core.attributes.copies.duplicates import JACCARD
from nmoe_core.attributes.language import language
from nmoe_core.attributes.minhash import NUM_BANDS, NUM_HASHES, NUM_ROWS, jaccard
from nmoe_core.attributes.pii import pii
from nmoe_core.attributes.presets import PRESETS
from nmoe_core.attributes.signals import signals
from nmoe_core.attributes.where import Rule, Where
from nmoe_core.cli.output import print_table

_INSERTED = ("evaluation question", "e-mail address", "boilerplate")
_SIMILARITIES = (0, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9)
_LANGUAGES = {"law_german": "de", "poetry_chinese": "zh", "books_english": "en"}


def main() -> None:
    """Mix the corpus, find, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peers", type=Path, help="directory of the peers' environments")
    arguments = parser.parse_args()
    corpus = plant(arguments.directory, arguments.seed)
    documents = corpus.documents
    size_mb = sum(len(document.text.encode()) for document in documents) / 1e6
    print(f"{len(documents)} documents, {size_mb:.1f} MB, seed {arguments.seed}")
    rows = duplicates(documents, corpus.priority)
    sides = {
        "ours": {document.name for document, row in zip(documents, rows) if row["is_survivor"]}
    }
    named = sum(
        (row["exact_of"] or row["near_of"]) == document.of
        for document, row in zip(documents, rows)
        if document.of and not row["is_survivor"]
    )
    for name in PEERS if arguments.peers else ():
        kept = survivors_of(name, documents, arguments.peers)
        if isinstance(kept, str):
            print(f"{name}: {kept}")
        else:
            sides[name] = kept
    _show_copies(documents, sides)
    dropped = sum(bool(one.of) and one.name not in sides["ours"] for one in documents)
    print(f"ours: {named} of {dropped} dropped copies name the document that was copied")
    _show_inserted(documents, corpus.questions)
    _show_languages(documents)


def _show_copies(documents: list[Document], sides: dict[str, set[str]]) -> None:
    """Pairs of which only one is left; a peer may keep either."""
    texts = {document.name: document.text for document in documents}
    pairs: dict[str, list[Document]] = {}
    for document in documents:
        if document.of:
            pairs.setdefault(document.kind, []).append(document)
    table, edited = [], []
    for kind, copies in pairs.items():
        similarity = [_jaccard(texts[one.of], one.text) for one in copies]
        expected = sum(_found_by_theory(one) for one in similarity)
        found = [
            [one.name not in kept or one.of not in kept for one in copies]
            for kept in sides.values()
        ]
        row = [kind, len(copies), round(float(np.mean(similarity)), 2), round(expected)]
        table.append([*row, *map(sum, found)])
        edited += [row for row in zip(similarity, *found) if row[0] < 1]
    paired = {name for one in documents if one.of for name in (one.name, one.of)}
    others = [one.name for one in documents if one.name not in paired]
    wrong = [sum(name not in kept for name in others) for kept in sides.values()]
    table.append(["dropped, but no copy was planted", len(others), "", "", *wrong])
    print_table(("copies", "planted", "Jaccard", "by theory", *sides), table)
    _show_similarities(np.array(edited, float), list(sides))


def _show_similarities(edited: np.ndarray, sides: list[str]) -> None:
    """Edited pairs by their similarity; rows are the similarity, and whether each side found it."""
    part = np.digitize(edited[:, 0], _SIMILARITIES) - 1
    table = []
    for i, least in enumerate(_SIMILARITIES):
        if len(rows := edited[part == i]):
            expected = sum(map(_found_by_theory, rows[:, 0]))
            table.append([least, len(rows), round(expected), *rows[:, 1:].sum(0).astype(int)])
    print()
    print_table(("Jaccard from", "pairs", "by theory", *sides), table)


def _found_by_theory(similarity: float) -> float:
    """The probability that a pair shares a whole band and enough of all hashes."""
    pmf = binom.pmf(np.arange(NUM_ROWS + 1), NUM_ROWS, similarity)
    missed = reduce(np.convolve, [np.append(pmf[:-1], 0)] * NUM_BANDS)  # no band is whole
    counts = reduce(np.convolve, [pmf] * NUM_BANDS)
    is_enough = jaccard(np.arange(NUM_HASHES + 1)) >= JACCARD
    return float((counts - missed)[is_enough].sum())


def _show_inserted(documents: list[Document], questions: list[str]) -> None:
    texts = pa.array([document.text for document in documents], pa.large_string())
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "asked.jsonl"
        write_jsonl(path, [{"question": text} for text in questions])
        sets = Evaluations.read({"asked": path})
    held = np.array(contamination(texts, sets).column("contamination").to_pylist()) > 0
    mails = np.array(pii(texts).column("n_emails").to_pylist()) > 0
    measured = signals(texts)
    clauses = " and ".join(PRESETS["gopher_repetition"].clauses)
    schema = {f"signals.{field.name}": field.type for field in measured.schema}
    labelled = measured.rename_columns(list(schema))
    rule = Where([Rule(clauses, "benchmark")], schema)
    repeats = ~np.logical_and.reduce(rule.evaluate(labelled.select(list(rule.columns))), axis=0)
    kinds = np.array([document.kind for document in documents])
    table = []
    for kind, found in zip(_INSERTED, (held, mails, repeats)):
        planted = kinds == kind
        table.append([kind, planted.sum(), found[planted].sum(), found[~planted].sum()])
    print()
    print_table(("inserted", "planted", "found", "in other documents"), table)


def _show_languages(documents: list[Document]) -> None:
    wanted = [one for one in documents if one.source in _LANGUAGES]
    found = language(pa.array([one.text for one in wanted], pa.large_string())).column("lang")
    counts = Counter((one.source, name) for one, name in zip(wanted, found.to_pylist()))
    print()
    table = [
        [
            source,
            expected,
            sum(n for (s, _), n in counts.items() if s == source),
            counts[source, expected],
        ]
        for source, expected in _LANGUAGES.items()
    ]
    print_table(("source", "language", "documents", "found"), table)


def _jaccard(first: str, second: str) -> float:
    """Of shingles of five words, or Chinese characters, without case and punctuation."""
    one, other = _shingles(first), _shingles(second)
    return len(one & other) / max(1, len(one | other))


def _shingles(text: str) -> set[tuple[str, ...]]:
    plain = "".join(char if char.isalnum() else " " for char in text.lower())
    words = "".join(f" {char} " if char > "\u2e80" else char for char in plain).split()
    return set(zip(*(words[i:] for i in range(5))))


if __name__ == "__main__":
    main()
