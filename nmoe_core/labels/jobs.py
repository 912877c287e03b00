"""The labelling jobs of a run: each has documents, an output directory and an oracle."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from nmoe_core.base.errors import ConfigError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.base.result import Result
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.config.quality import OracleTable
from nmoe_core.config.rubric import Rubric
from nmoe_core.config.run import Run
from nmoe_core.config.tree import Tree
from nmoe_core.labels.agreement import NOISE_NAMES
from nmoe_core.labels.cost import Estimate, Part, estimate_labels, require_cost
from nmoe_core.labels.documents import Documents, shard_documents
from nmoe_core.labels.label import label_shard
from nmoe_core.labels.oracle import RETRY_TEMPERATURE, Oracle, OracleResult, Question
from nmoe_core.labels.oracles import make_oracle
from nmoe_core.labels.slices import LABEL_SHARDS, combine_slices
from nmoe_core.text.tokenizer import load_tokenizer

_SLICES = {f"{split}-{i:02d}": (split, i) for split, i in LABEL_SHARDS}


class LabelJob(NamedTuple):
    """Documents to label into a directory; a sample of `relabel` documents is labelled again to
    measure noise."""

    name: str
    documents: Documents
    out_dir: Path
    relabel: int


class Sampled:
    """Wraps an oracle so that it samples its answers, instead of giving the most likely answers.
    The samples are independent of each other and of samples that the wrapped oracle draws."""

    def __init__(self, oracle: Oracle) -> None:
        version = f"{oracle.scorer.scorer_version}/sampled"
        self.scorer = oracle.scorer._replace(scorer_version=version)
        self.fingerprint = sha256_json([oracle.fingerprint, "sampled/2", RETRY_TEMPERATURE])
        self.facts = oracle.facts | {"temperature": RETRY_TEMPERATURE, "seed": "by text"}
        self.scale = oracle.scale
        self._oracle = oracle

    def label(self, questions: Iterable[Question]) -> Iterator[tuple[int, OracleResult]]:
        return self._oracle.label(question._replace(is_redrawn=True) for question in questions)


@dataclass(frozen=True, eq=False, slots=True)
class Labelling:
    """The parts of a run that labelling needs; see `labelling_of`.

    Attributes:
        tree: The paths of the run.
        rubric: The rubric of the labels; noise is also measured with its dimensions in reverse.
        table: The oracle's settings.
        tokenizer: The tokenizer of the shards.
        base: The directory to which the table's relative paths are relative.
        replace: Whether labels of another oracle are dropped; "free": only labels that cost
            nothing.
    """

    tree: Tree
    rubric: Rubric
    table: OracleTable
    tokenizer: TokenizerSettings
    base: Path
    replace: bool | Literal["free"]
    _oracles: dict[Rubric, Oracle] = field(default_factory=dict, init=False)

    def oracle(self, rubric: Rubric) -> Oracle:
        """The oracle for a rubric, opened once per rubric. Raises as `make_oracle`."""
        if rubric not in self._oracles:
            self._oracles[rubric] = make_oracle(self.table, rubric, self.base.joinpath)
        return self._oracles[rubric]

    def without_key(self) -> "Labelling":
        """A copy without the API key of the oracle's server. Use it only for fingerprints, which
        send no request."""
        if self.table.http is None:
            return self
        http = self.table.http.model_copy(update={"api_key_env": None})
        return replace(self, table=self.table.model_copy(update={"http": http}))

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
        yield from self.planned_jobs(keys)

    def planned_jobs(self, keys: Sequence[str] | None = None) -> Iterator[LabelJob]:
        """Yield the labelling jobs of existing slices (default: all). Raises as
        `shard_documents`."""
        tree = self.tree
        tokenizer = load_tokenizer(self.tokenizer)
        labelled = tuple(tree.label_shard(*shard) for shard in _SLICES.values())
        for key in _SLICES if keys is None else keys:
            split, number = _SLICES[key]
            slice_file = tree.slice(split, number)
            documents = shard_documents(slice_file, tree.data, tokenizer, self.table.max_doc_tokens)
            relabel = self.table.relabel if split == "val" else 0
            documents = replace(documents, labelled=labelled)
            yield LabelJob(key, documents, tree.label_shard(split, number), relabel)

    def parts(self, job: LabelJob) -> Iterator[Part]:
        """Yield the parts of a job: documents, the directory of their labels, and the oracle.

        First all documents, then the sample that measures the oracle's noise: once with the
        dimensions in reverse order (if the rubric has several), once with sampled answers (if the
        oracle can sample).
        """
        yield job.documents, job.out_dir, self.oracle(self.rubric)
        if not job.relabel:
            return
        asked: dict[str, Oracle] = {}
        if len(self.rubric.dimensions) > 1:
            asked["order"] = self.oracle(self.rubric.turned())
        if self.table.kind != "heuristic":
            asked["sampling"] = Sampled(self.oracle(self.rubric))
        for kind, oracle in asked.items():
            name = NOISE_NAMES[kind]
            labelled = tuple(directory / name for directory in job.documents.labelled)
            sample = replace(job.documents.sample(job.relabel), labelled=labelled)
            yield sample, job.out_dir / name, oracle

    def estimate(self, jobs: Iterable[LabelJob]) -> dict[str, Estimate]:
        """As `estimate_labels`."""
        parts = ((job.name, self.parts(job)) for job in jobs)
        return estimate_labels(self.table, self.rubric, load_tokenizer(self.tokenizer), parts)

    def label_slices(
        self, sources: Sequence[str], keys: Sequence[str] | None, *, is_whole_budget: bool
    ) -> Iterator[tuple[LabelJob, Result]]:
        """Label slices, by default all. If `is_whole_budget`, the cost limit applies to all slices
        of the run, not only to these slices. Raises as `slice_jobs` and `label`."""
        self._require_budget(self.slice_jobs(sources, None if is_whole_budget else keys))
        for job in self.slice_jobs(sources, keys):
            yield job, self._label(job)

    def label(self, jobs: Sequence[LabelJob]) -> Iterator[tuple[LabelJob, Result]]:
        """Label the documents of jobs. Facts: see `label_shard`, and the `scorer` and the number of
        documents `relabelled`. Raises as `label_shard`, and LabelError if the labels would cost
        more than `[oracle.http] max_cost` (E-LABEL-COST)."""
        self._require_budget(jobs)
        for job in jobs:
            yield job, self._label(job)

    def _require_budget(self, jobs: Iterable[LabelJob]) -> None:
        """If `max_cost` is not set, this reads no documents."""
        http = self.table.http
        if self.table.kind == "http" and http is not None and http.max_cost is not None:
            require_cost(self.estimate(jobs)["all"], http.max_cost, http.model)

    def _label(self, job: LabelJob) -> Result:
        first, *again = self.parts(job)
        retries = self.table.max_retries
        made = label_shard(*first, replace=self.replace, max_retries=retries)
        facts = made.facts | {"scorer": first[2].scorer.name}
        for documents, out_dir, oracle in again:
            # The labels are current at this point, so a sample that does not match them is always
            # replaced.
            drops = isinstance(oracle, Sampled) or self.replace
            sample = label_shard(documents, out_dir, oracle, replace=drops, max_retries=retries)
            facts["relabelled"] = sample.facts["total"]
        return Result(made.digest, facts)


def labelling_of(run: Run) -> Labelling:
    """The parts of a run that labelling needs."""
    table = run.config.oracle
    # If only the project file sets `replace`, a change of the oracle drops no labels that cost
    # money. Such labels are dropped only if the command itself sets `replace`.
    drops = table.replace and (run.is_given("oracle.replace") or "free")
    return Labelling(run.tree, run.rubric, table, run.tokenizer, run.base, drops)
