"""Estimates the cost of labelling: questions, tokens and price, without asking the oracle.

The tokens of prompts are counted with the run's tokenizer, plus a fixed number for the template and
schema that a server adds. An answer is taken to have the mean length of the oracle's earlier
answers, or the maximum length if there are fewer than `MIN_ANSWERS`. Retries are not included. The
estimate reads the texts: each distinct text is one question; an empty text needs no question.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from nmoe_core.base.errors import LabelError
from nmoe_core.config.quality import OracleTable
from nmoe_core.config.rubric import Rubric
from nmoe_core.labels.documents import Documents
from nmoe_core.labels.oracle import Oracle
from nmoe_core.labels.oracles.harmony import fenced
from nmoe_core.labels.reuse import KnownAnswers, sha256_of
from nmoe_core.text.tokenizer import Tokenizer

TEMPLATE_TOKENS = 128
MIN_ANSWERS = 30
# Documents, the directory of their labels, and the oracle that labels them.
Part = tuple[Documents, Path, Oracle]


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate of the questions to ask; `cost` is None without prices."""

    questions: int
    tokens_in: int
    tokens_out: int
    cost: float | None


def estimate_labels(
    table: OracleTable,
    rubric: Rubric,
    tokenizer: Tokenizer,
    jobs: Iterable[tuple[str, Iterable[Part]]],
) -> dict[str, Estimate]:
    """Estimate the questions that labelling would still ask: per job name, and for `all` jobs.
    `jobs` has the name and the parts of each job."""
    prompt = rubric.text().join(fenced(""))
    prompt_tokens = TEMPLATE_TOKENS + len(tokenizer.encode_long(prompt, 1 << 30))
    rows: dict[str, tuple[int, ...]] = {}
    # Texts to ask about; jobs that reuse each other's answers share one set of texts.
    seen: dict[tuple[str, tuple[Path, ...]], set[bytes]] = {}
    with ExitStack() as stack:

        @functools.cache
        def known_of(oracle: Oracle, *directories: Path) -> KnownAnswers:
            return stack.enter_context(KnownAnswers(directories, oracle))

        for name, parts in jobs:
            num = tokens_in = tokens_out = 0
            for documents, out_dir, oracle in parts:
                known = known_of(oracle, *sorted({out_dir, *documents.labelled}))
                where = documents.labelled or (out_dir,)
                texts = seen.setdefault((oracle.fingerprint, where), set())
                asked = list(_unasked(documents, known, table.max_retries, texts))
                num += len(asked)
                tokens_in += sum(map(documents.num_tokens, asked)) + len(asked) * prompt_tokens
                tokens_out += round(len(asked) * _tokens_of_an_answer(known, table))
            rows[name] = num, tokens_in, tokens_out
    rows["all"] = tuple(map(sum, zip(*rows.values()))) or (0, 0, 0)
    return {
        name: Estimate(num, tokens_in, tokens_out, _cost(table, tokens_in, tokens_out))
        for name, (num, tokens_in, tokens_out) in rows.items()
    }


def require_cost(found: Estimate, max_cost: float, model: str) -> None:
    """Raise LabelError if the labels would cost more than `[oracle.http] max_cost`
    (E-LABEL-COST)."""
    if (cost := found.cost or 0.0) > max_cost:
        raise LabelError(
            "labelling would cost more than allowed",
            where=model,
            found=f"{cost:,.2f} for {found.questions:,} questions of {found.tokens_in:,} tokens "
            f"and answers of {found.tokens_out:,}",
            expected=f"at most {max_cost:,.2f}",
            do="label fewer documents, lower max_doc_tokens or max_new, or raise [oracle.http] "
            "max_cost",
            code="E-LABEL-COST",
        )


def _unasked(
    documents: Documents, known: KnownAnswers, max_retries: int, seen: set[bytes]
) -> Iterator[str]:
    """Yield the ids of documents that labelling would ask about; adds their texts to `seen`."""
    for doc_id, _ in documents.rows:
        text, is_cut = documents.text(doc_id)
        digest = sha256_of(text)
        key = bytes.fromhex(digest)
        record = known.find(digest, is_cut)
        is_open = record is None or (not record["ok"] and record["attempts"] <= max_retries)
        if is_open and text.strip() and key not in seen:
            seen.add(key)
            yield doc_id


def _tokens_of_an_answer(known: KnownAnswers, table: OracleTable) -> float:
    if len(known.new_tokens) >= MIN_ANSWERS:
        return sum(known.new_tokens) / len(known.new_tokens)
    if table.kind == "heuristic":
        return 0
    asked = table.engine if table.kind == "engine" else table.http
    return asked.max_new if asked else 0


def _cost(table: OracleTable, tokens_in: int, tokens_out: int) -> float | None:
    http = table.http if table.kind == "http" else None
    if http is None or http.input_price is None or http.output_price is None:
        return None
    return (tokens_in * http.input_price + tokens_out * http.output_price) / 1e6
