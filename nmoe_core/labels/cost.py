"""Estimates the cost of labelling: questions, tokens and price, without asking the oracle.

The tokens of prompts are counted with the run's tokenizer, plus a fixed number for the template and
schema that a server adds. An answer is taken to have the mean length of the oracle's earlier
answers, or the maximum length if there are fewer than `MIN_ANSWERS`. Retries are not included. The
estimate reads the texts: each distinct text is one question; an empty text needs no question.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nmoe_core.base.errors import LabelError
from nmoe_core.config.quality import OracleTable
from nmoe_core.config.rubric import Rubric
from nmoe_core.labels.answers import Ledger, Outcome
from nmoe_core.labels.documents import Documents
from nmoe_core.labels.oracle import Oracle, sha256_of
from nmoe_core.labels.oracles.harmony import fenced
from nmoe_core.labels.oracles.spent import Budget
from nmoe_core.labels.scores import rounded
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


def total(estimates: Sequence[Estimate]) -> Estimate:
    """The sum of estimates; the cost is None if one has no price."""
    return Estimate(
        sum(one.questions for one in estimates),
        sum(one.tokens_in for one in estimates),
        sum(one.tokens_out for one in estimates),
        sum_of([one.cost for one in estimates]),
    )


def sum_of(costs: Iterable[float | None]) -> float | None:
    """The sum of costs, with six decimals; None if one is None."""
    known = list(costs)
    return None if None in known else rounded(sum(cost or 0.0 for cost in known))


def estimate_labels(
    table: OracleTable,
    rubric: Rubric,
    tokenizer: Tokenizer,
    jobs: Iterable[tuple[str, Ledger, Iterable[Part]]],
) -> dict[str, Estimate]:
    """Estimate the questions that labelling would still ask: per job name, and for `all` jobs.
    `jobs` has the name, the ledger and the parts of each job."""
    prompt = rubric.text().join(fenced(""))
    prompt_tokens = TEMPLATE_TOKENS + len(tokenizer.encode_long(prompt, 1 << 30))
    rows: dict[str, tuple[int, ...]] = {}
    seen: dict[tuple[Ledger, str], set[str]] = {}  # texts to ask about
    for name, ledger, parts in jobs:
        num = tokens_in = tokens_out = 0
        for documents, _, oracle in parts:
            if not oracle.request_digest:
                continue
            texts = seen.setdefault((ledger, oracle.request_digest), set())
            open_now = open_texts(documents, ledger, oracle, table.max_retries, texts)
            asked = [doc_id for doc_id, _, _ in open_now]
            num += len(asked)
            tokens_in += sum(map(documents.num_tokens, asked)) + len(asked) * prompt_tokens
            tokens_out += round(len(asked) * _tokens_of_an_answer(ledger, oracle, table))
        rows[name] = num, tokens_in, tokens_out
    rows["all"] = tuple(map(sum, zip(*rows.values()))) or (0, 0, 0)
    return {
        name: Estimate(num, tokens_in, tokens_out, table.cost(tokens_in, tokens_out))
        for name, (num, tokens_in, tokens_out) in rows.items()
    }


def require_cost(found: Estimate, spent: float, budget: Budget, model: str) -> None:
    """Raise LabelError if the labels would cost more than the budget, with what the answers so far
    have cost (E-LABEL-COST)."""
    cost = spent + (found.cost or 0.0)
    if found.questions and cost > budget.max_cost:
        raise LabelError(
            "labelling would cost more than allowed",
            where=model,
            found=f"{cost:,.2f}: {spent:,.2f} so far, and {found.questions:,} questions of "
            f"{found.tokens_in:,} tokens with answers of {found.tokens_out:,}",
            expected=f"at most {budget.max_cost:,.2f}",
            do="label fewer documents, lower max_doc_tokens or max_new, or raise [oracle.http] "
            "max_cost",
            code="E-LABEL-COST",
        )


def too_expensive(oracle: Oracle, cost: float, budget: Budget) -> LabelError:
    """The error of a run whose answers cost more than its budget."""
    return LabelError(
        "the answers cost as much as allowed",
        where=oracle.scorer.scorer_model,
        found=f"{cost:,.2f} for all answers of this oracle so far",
        expected=f"at most {budget.max_cost:,.2f}",
        do="raise [oracle.http] max_cost; the answers so far are stored",
        code="E-LABEL-COST",
    )


def open_texts(
    documents: Documents, ledger: Ledger, oracle: Oracle, max_retries: int, seen: set[str]
) -> Iterator[tuple[str, str, Outcome]]:
    """Yield document id, text and outcome of each text that labelling would ask about; adds the
    texts' digests to `seen`, and leaves out those that are in it."""
    oracle.settle(ledger.accepts)
    for doc_id, _ in documents.rows:
        text = documents.text(doc_id).text
        digest = sha256_of(text)
        if not text.strip() or digest in seen:
            continue
        outcome = ledger.outcome(oracle, digest)
        if outcome.is_open(max_retries):
            seen.add(digest)
            yield doc_id, text, outcome


def _tokens_of_an_answer(ledger: Ledger, oracle: Oracle, table: OracleTable) -> float:
    spent = ledger.spent[oracle.request_digest]
    if spent.answers >= MIN_ANSWERS:
        return spent.tokens_out / spent.answers
    if oracle.max_new is not None:
        return oracle.max_new
    return table.engine.max_new if table.kind == "engine" else 0
