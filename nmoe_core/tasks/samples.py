"""A few rows of the result of a task, for people to look at: text with scores and decision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import orjson

from loader.files.format import load_manifest
from nmoe_core.config.run import Run
from nmoe_core.shards.documents import DocumentReader, beginning, document_ids
from nmoe_core.text.tokenizer import load_tokenizer

Row = dict[str, str | int | float]
_TEXT_CHARS = 160
_TEXT_TOKENS = 64


def sample_documents(run: Run, source: str, split: str, bucket: int, count: int = 4) -> list[Row]:
    """The first documents of a shard: their number of tokens and the start of their text."""
    path = run.tree.shard(source, bucket, split).manifest
    documents = list(islice(document_ids(run.tree.data, load_manifest(path)), count))
    texts = _texts(run, [str(document) for document in documents])
    return [
        {"text": text, "tokens": document.end - document.start, "doc_id": str(document)}
        for document, text in zip(documents, texts)
    ]


def sample_grades(run: Run, source: str, bucket: int, count: int = 7) -> list[Row]:
    """Documents of a graded shard at even ranks of their score, lowest first.

    Columns are few and narrow, so that the text has room: the decision, the score it rests on and
    whose that is, and the probe's own.
    """
    from nmoe_core.calibration.graded import read_graded

    path = read_graded(run.tree.shard(source, bucket).graded).path
    with open(path, "rb") as file:
        scores = [orjson.loads(line)["aggregated"] for line in file]
    ranked = sorted(range(len(scores)), key=scores.__getitem__)
    steps = range(min(count, len(ranked)))
    chosen = [ranked[i * (len(ranked) - 1) // max(len(steps) - 1, 1)] for i in steps]
    wanted = set(chosen)
    with open(path, "rb") as file:
        rows = {i: orjson.loads(line) for i, line in enumerate(file) if i in wanted}
    picked = [rows[i] for i in chosen]
    texts = _texts(run, [row["doc_id"] for row in picked])
    return [
        {
            "decision": row["decision"],
            "score": round(row["aggregated"], 3),
            "probe": round(row["q_probe"], 3),
            "by": "probe" if row["early_exit"] else "judge",
            "text": text,
        }
        for row, text in zip(picked, texts)
    ]


def sample_labels(run: Run, key: str, count: int = 5) -> list[Row]:
    """The first parsed labels of a slice: scores and the start of the text.

    The five scores are one column, in the order of the schema, which leaves the text its room.
    """
    from nmoe_core.labels.files import SCORES_NAME

    split, _, number = key.rpartition("-")
    path = run.tree.label_shard(split, int(number)) / SCORES_NAME
    return list(islice(_label_rows(path.read_bytes().splitlines()), count))


def _label_rows(lines: Iterable[bytes]) -> Iterator[Row]:
    from nmoe_core.labels.scores import DIMENSIONS

    for line in lines:
        record = orjson.loads(line)
        if record["ok"]:
            scores: dict[str, Any] = record["scores"]
            yield {
                "aggregated": round(record["aggregated"], 3),
                "scores": ",".join(str(scores[name]) for name in DIMENSIONS),
                "text": _start(record["snippet"]),
            }


def _texts(run: Run, doc_ids: Sequence[str]) -> list[str]:
    tokenizer = load_tokenizer(run.tokenizer, run.config.prep.engine)
    reader = DocumentReader(run.tree.data)
    texts = []
    for doc_id in doc_ids:
        tokens = reader.tokens(doc_id, tokenizer.eos_token_id)
        text, is_truncated = beginning(tokens, tokenizer, _TEXT_TOKENS)
        texts.append(_start(text, is_whole=not is_truncated))
    return texts


def _start(text: str, *, is_whole: bool = True) -> str:
    """The start of a text on one line; an ellipsis says that it goes on."""
    line = " ".join(text.split())
    if is_whole and len(line) <= _TEXT_CHARS:
        return line
    return f"{line[:_TEXT_CHARS].rstrip()}…"
