"""The labelling jobs of a run: each has documents, an output directory and an oracle."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from nmoe_core.base.errors import ConfigError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.base.result import Result
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.config.quality import OracleTable
from nmoe_core.config.rubric import Rubric
from nmoe_core.config.run import Run
from nmoe_core.config.tree import Tree
from nmoe_core.labels.agreement import NOISE_NAMES
from nmoe_core.labels.answers import Ledger
from nmoe_core.labels.cost import Estimate, Part, estimate_labels, require_cost, sum_of, total
from nmoe_core.labels.documents import Documents, shard_documents
from nmoe_core.labels.label import label_shard
from nmoe_core.labels.oracle import RETRY_TEMPERATURE, Keep, Oracle, OracleResult, Question, Reply
from nmoe_core.labels.oracles import make_oracle
from nmoe_core.labels.oracles.panel import RATERS_NAME, Panel
from nmoe_core.labels.oracles.spent import Budget
from nmoe_core.labels.sample import (
    draw_sample,
    drawn_ids,
    planned_fingerprints,
    sample_fingerprints,
    sampled_rows,
)
from nmoe_core.labels.slices import LABEL_SHARDS, combine_slices
from nmoe_core.text.tokenizer import load_tokenizer

_SPENT = ("replies", "retries", "tokens_in", "tokens_out")
_SLICES = {f"{split}-{i:02d}": (split, i) for split, i in LABEL_SHARDS}


class LabelJob(NamedTuple):
    """Documents to label into a directory, with the directory of the ledger. A sample of `relabel`
    documents is labelled again to measure noise."""

    name: str
    documents: Documents
    out_dir: Path
    answers: Path
    relabel: int


def _drawn(request_digest: str) -> str:
    return sha256_json([request_digest, "sampled", RETRY_TEMPERATURE])[:16]


class Sampled:
    """Wraps an oracle so that it samples its answers, instead of giving the most likely answers.
    The samples are independent of each other and of samples that the wrapped oracle draws."""

    def __init__(self, oracle: Oracle) -> None:
        version = f"{oracle.scorer.scorer_version}/sampled"
        self.scorer = oracle.scorer._replace(scorer_version=version)
        self.fingerprint = sha256_json([oracle.fingerprint, "sampled/2", RETRY_TEMPERATURE])
        self.facts = oracle.facts | {"temperature": RETRY_TEMPERATURE, "seed": "by text"}
        self.request_digest = _drawn(oracle.request_digest)
        self.request_digests = tuple(map(_drawn, oracle.request_digests))
        self.max_new = oracle.max_new
        self.served = oracle.served
        self.scale = oracle.scale
        self._oracle = oracle

    def settle(self, accepts: Callable[[str], bool | None]) -> None:
        def either(digest: str) -> bool | None:
            found = accepts(_drawn(digest))
            return accepts(digest) if found is None else found

        self._oracle.settle(either)
        self.request_digest = _drawn(self._oracle.request_digest)

    def label(
        self, questions: Iterable[Question], keep: Keep | None = None
    ) -> Iterator[tuple[int, OracleResult]]:
        redrawn = (question._replace(is_redrawn=True) for question in questions)
        return self._oracle.label(redrawn, keep)

    def read(self, reply: Reply) -> OracleResult | None:
        return self._oracle.read(reply)

    def request(self, question: Question) -> bytes:
        from nmoe_core.labels.oracles.http import HttpOracle

        assert isinstance(self._oracle, HttpOracle)
        return self._oracle.request(question._replace(is_redrawn=True))


@dataclass(frozen=True, eq=False, slots=True)
class Labelling:
    """The parts of a run that labelling needs; see `labelling_of`.

    Attributes:
        tree: The paths of the run.
        rubric: The rubric of the labels; noise is also measured with its dimensions in reverse.
        table: The oracle's settings.
        tokenizer: The tokenizer of the shards.
        base: The directory to which the table's relative paths are relative.
    """

    tree: Tree
    rubric: Rubric
    table: OracleTable
    tokenizer: TokenizerSettings
    base: Path
    _raters: dict[str, "Labelling"] = field(default_factory=dict, init=False)
    _oracles: dict[Rubric, Oracle] = field(default_factory=dict, init=False)
    _ledgers: dict[Path, Ledger] = field(default_factory=dict, init=False)

    def oracle(self, rubric: Rubric) -> Oracle:
        """The oracle for a rubric, opened once per rubric. Raises as `make_oracle`."""
        if rubric not in self._oracles:
            if self.raters:
                raters = {name: rater.oracle(rubric) for name, rater in self.raters.items()}
                self._oracles[rubric] = Panel(raters, self.table.combine)
            else:
                self._oracles[rubric] = make_oracle(self.table, rubric, self.base)
        return self._oracles[rubric]

    @property
    def raters(self) -> dict[str, "Labelling"]:
        """The raters of a panel, by name; empty for other kinds of oracles."""
        if not self._raters and self.table.kind == "panel":
            for name, http in self.table.panel.items():
                own = {"kind": "http", "http": http, "panel": {}}
                self._raters[name] = replace(self, table=self.table.model_copy(update=own))
        return self._raters

    def _of_raters(self, jobs: Iterable[LabelJob]) -> dict["Labelling", list[LabelJob]]:
        """The jobs of the raters of a panel; of other oracles, the same jobs."""
        if not self.raters:
            return {self: list(jobs)}
        found: dict[Labelling, list[LabelJob]] = {rater: [] for rater in self.raters.values()}
        for job in jobs:
            for name, rater in self.raters.items():
                found[rater].append(job._replace(out_dir=job.out_dir / RATERS_NAME / name))
        return found

    def _sampled(self) -> Oracle:
        if not self.raters:
            return Sampled(self.oracle(self.rubric))
        raters = {name: rater._sampled() for name, rater in self.raters.items()}
        return Panel(raters, self.table.combine)

    def without_key(self) -> "Labelling":
        """A copy without the API key of the oracle's server. Use it only for fingerprints, which
        send no request."""
        no_key = {"api_key_env": None}
        http = self.table.http and self.table.http.model_copy(update=no_key)
        panel = {name: one.model_copy(update=no_key) for name, one in self.table.panel.items()}
        return replace(self, table=self.table.model_copy(update={"http": http, "panel": panel}))

    def slice_jobs(
        self, sources: Sequence[str], keys: Sequence[str] | None = None
    ) -> Iterator[LabelJob]:
        """Yield the labelling job of each slice, by default of all slices. Raises ConfigError if a
        slice does not exist."""
        for key in keys or ():
            if key not in _SLICES:
                expected = f"{next(iter(_SLICES))} to {next(reversed(_SLICES))}"
                raise ConfigError("no such slice", found=key, expected=expected)
        combine_slices(self.tree, sources)
        draw_sample(self.tree, sources, self.table.max_documents)
        yield from self.planned_jobs(keys)

    def planned_jobs(self, keys: Sequence[str] | None = None) -> Iterator[LabelJob]:
        """Yield the labelling jobs of existing slices (default: all). Raises as
        `shard_documents`."""
        tree = self.tree
        tokenizer = load_tokenizer(self.tokenizer)
        drawn = drawn_ids(tree, self.table.max_documents)
        of_sample = sample_fingerprints(tree, self.table.max_documents)
        for key in _SLICES if keys is None else keys:
            split, number = _SLICES[key]
            slice_file = tree.slice(split, number)
            rows = sampled_rows(slice_file, drawn)
            most = self.table.max_doc_tokens
            documents = shard_documents(slice_file, tree.data, tokenizer, most, rows)
            more = of_sample and of_sample | planned_fingerprints(tree, split)
            documents = replace(documents, fingerprints=documents.fingerprints | more)
            relabel = self.table.relabel if split == "val" else 0
            yield LabelJob(key, documents, tree.label_shard(split, number), tree.answers, relabel)

    def parts(self, job: LabelJob) -> Iterator[Part]:
        """Yield the parts of a job: documents, the directory of their labels, and the oracle. A
        panel follows its raters.

        First all documents, then the sample that measures the oracle's noise: once with the
        dimensions in reverse order (if the rubric has several), once with sampled answers (if the
        oracle can sample).
        """
        for rater, jobs in self._of_raters([job]).items() if self.raters else ():
            yield from rater.parts(jobs[0])
        yield job.documents, job.out_dir, self.oracle(self.rubric)
        if not job.relabel:
            return
        asked: dict[str, Oracle] = {}
        if len(self.rubric.dimensions) > 1:
            asked["order"] = self.oracle(self.rubric.turned())
        if self.table.kind != "heuristic":
            asked["sampling"] = self._sampled()
        for kind, oracle in asked.items():
            yield job.documents.sample(job.relabel), job.out_dir / NOISE_NAMES[kind], oracle

    def estimate(self, jobs: Iterable[LabelJob]) -> dict[str, Estimate]:
        """As `estimate_labels`."""
        if self.raters:
            of_raters = [rater.estimate(own) for rater, own in self._of_raters(jobs).items()]
            return {name: total([one[name] for one in of_raters]) for name in of_raters[0]}
        parts = ((job.name, self.ledger(job), self.parts(job)) for job in jobs)
        return estimate_labels(self.table, self.rubric, load_tokenizer(self.tokenizer), parts)

    def label_slices(
        self, sources: Sequence[str], keys: Sequence[str] | None, *, is_whole_budget: bool
    ) -> Iterator[tuple[LabelJob, Result]]:
        """Label slices, by default all. If `is_whole_budget`, the cost limit applies to all slices
        of the run, not only to these slices. Raises as `slice_jobs` and `label`."""
        self.require_budget(self.slice_jobs(sources, None if is_whole_budget else keys))
        for job in self.slice_jobs(sources, keys):
            yield job, self._label(job)

    def label(self, jobs: Sequence[LabelJob]) -> Iterator[tuple[LabelJob, Result]]:
        """Label the documents of jobs. Facts: see `label_shard`, with the replies about noise; the
        `cost` of the replies (None without prices), the `scorer`, and the number of documents
        `relabelled`. Raises as `label_shard`, and LabelError if the labels would cost
        more than `[oracle.http] max_cost` (E-LABEL-COST)."""
        self.require_budget(jobs)
        for job in jobs:
            yield job, self._label(job)

    def require_budget(self, jobs: Iterable[LabelJob]) -> None:
        """Raise LabelError if the labels would cost more than `[oracle.http] max_cost`
        (E-LABEL-COST). If it is not set, this reads no documents."""
        if all(rater.budget is None for rater in self.raters.values() or [self]):
            return
        for rater, own in self._of_raters(jobs).items():
            if rater.budget is not None:
                found = rater.estimate(own)["all"]
                ledgers = {rater.ledger(job) for job in own}
                spent = sum(rater.budget.cost(ledger.spent) for ledger in ledgers)
                model = rater.oracle(self.rubric).scorer.scorer_model
                require_cost(found, spent, rater.budget, model)

    @property
    def budget(self) -> Budget | None:
        """The prices and the limit of `[oracle.http]`, if it has a limit."""
        http = self.table.http
        if self.table.kind != "http" or http is None or http.max_cost is None:
            return None
        return Budget(self.table, http.max_cost, frozenset(self._kinds()))

    def _asked(self) -> dict[str, Oracle]:
        """The oracles of the labels, and of both kinds of noise."""
        first = self.oracle(self.rubric)
        turned = self.oracle(self.rubric.turned())
        return {"labels": first, "order": turned, "sampling": Sampled(first)}

    def _kinds(self) -> dict[str, str]:
        """What is asked, by `Oracle.request_digest`."""
        asked = self._asked().items()
        return {digest: kind for kind, oracle in asked for digest in oracle.request_digests}

    def account(self) -> list[dict[str, Any]]:
        """What all answers in the run's ledger cost, one row per model and kind of `questions`:
        `labels`, `order` and `sampling` (noise), or `other settings` than the run's.

        `retries` are requests about a text that had been sent before. `cost` is None without
        prices, and for other settings, whose prices are not known. Raises as `Ledger`.
        """
        kinds = {
            digest: (kind, rater.table)
            for rater in self.raters.values() or [self]
            if rater.table.kind == "http"
            for digest, kind in rater._kinds().items()
        }
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for request, spent in Ledger(self.tree.answers).spent.items():
            kind, table = kinds.get(request, ("other settings", None))
            row = {"rater": spent.model or self.table.kind, "questions": kind}
            counts = {"requests": spent.replies, "retries": spent.retries, "answers": spent.answers}
            counts |= {"tokens_in": spent.tokens_in, "tokens_out": spent.tokens_out}
            found = rows.setdefault((row["rater"], kind), row | dict.fromkeys(counts, 0))
            for key, count in counts.items():
                found[key] += count
            costs = found.setdefault("cost", [])
            costs.append(table and table.cost(spent.tokens_in, spent.tokens_out))
        return [row | {"cost": sum_of(row["cost"])} for row in rows.values()]

    def ledger(self, job: LabelJob) -> Ledger:
        """The answers so far. Raises as `Ledger`."""
        if job.answers not in self._ledgers:
            budgets = [rater.budget for rater in self.raters.values() or [self]]
            given = [budget for budget in budgets if budget is not None]
            self._ledgers[job.answers] = Ledger(job.answers, given)
        return self._ledgers[job.answers]

    def _label(self, job: LabelJob) -> Result:
        ledger = self.ledger(job)
        made: dict[Path, Result] = {}
        for documents, out_dir, oracle in self.parts(job):
            if isinstance(oracle, Panel):
                oracle.ledger = ledger
            retries = self.table.max_retries
            made[out_dir] = label_shard(
                documents, out_dir, oracle, ledger=ledger, max_retries=retries
            )
        whole = made[job.out_dir]
        counts: dict[str, int] = dict.fromkeys(("num_new", "num_reused", *_SPENT), 0)
        costs: list[float | None] = []
        for rater, [own] in self._of_raters([job]).items():
            for key in ("num_new", "num_reused"):
                counts[key] += made[own.out_dir].facts[key]
            parts = [part for path, part in made.items() if path.is_relative_to(own.out_dir)]
            spent = {key: sum(part.facts[key] for part in parts) for key in _SPENT}
            for key, count in spent.items():
                counts[key] += count
            costs.append(rater.table.cost(spent["tokens_in"], spent["tokens_out"]))
        scorer = self.oracle(self.rubric).scorer.name
        facts = whole.facts | counts | {"cost": sum_of(costs), "scorer": scorer}
        *_, last = made
        if last != job.out_dir:
            facts["relabelled"] = made[last].facts["total"]
        return Result(whole.digest, facts)


def labelling_of(run: Run) -> Labelling:
    """The parts of a run that labelling needs."""
    return Labelling(run.tree, run.rubric, run.config.oracle, run.tokenizer, run.base)
