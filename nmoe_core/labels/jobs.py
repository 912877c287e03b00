"""The labelling jobs of a run: each has documents, an output directory and an oracle."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from nmoe_core.base.errors import ConfigError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.base.result import Result
from nmoe_core.config.rubric import Rubric
from nmoe_core.config.run import Run
from nmoe_core.labels.agreement import NOISE_NAMES
from nmoe_core.labels.documents import Documents, shard_documents
from nmoe_core.labels.label import Progress, label_shard
from nmoe_core.labels.oracle import RETRY_TEMPERATURE, Oracle, OracleResult, Question
from nmoe_core.labels.oracles import make_oracle
from nmoe_core.labels.slices import LABEL_SHARDS, combine_slices
from nmoe_core.text.tokenizer import load_tokenizer

Oracles = Callable[[Rubric], Oracle]


class LabelJob(NamedTuple):
    """Documents to label into a directory; a sample of `relabel` documents is labelled again to
    measure noise."""

    name: str
    documents: Documents
    out_dir: Path
    relabel: int


def slice_jobs(
    run: Run, sources: Sequence[str], keys: Sequence[str] | None = None
) -> Iterator[LabelJob]:
    """Yield the labelling job of each slice, by default of all slices. Raises ConfigError if a
    slice does not exist."""
    known = {f"{split}-{i:02d}": (split, i) for split, i in LABEL_SHARDS}
    for key in keys or ():
        if key not in known:
            expected = f"{next(iter(known))} to {next(reversed(known))}"
            raise ConfigError("no such slice", found=key, expected=expected)
    combine_slices(run.tree, sources)
    yield from planned_jobs(run, keys)


def planned_jobs(run: Run, keys: Sequence[str] | None = None) -> Iterator[LabelJob]:
    """Yield the labelling jobs of existing slices (default: all). Raises as `shard_documents`."""
    tree = run.tree
    table = run.config.oracle
    known = {f"{split}-{i:02d}": (split, i) for split, i in LABEL_SHARDS}
    tokenizer = load_tokenizer(run.tokenizer)
    labelled = tuple(tree.label_shard(*shard) for shard in known.values())
    for key in known if keys is None else keys:
        slice_file = tree.slice(*known[key])
        documents = shard_documents(slice_file, tree.data, tokenizer, table.max_doc_tokens)
        relabel = table.relabel if known[key][0] == "val" else 0
        documents = replace(documents, labelled=labelled)
        yield LabelJob(key, documents, tree.label_shard(*known[key]), relabel)


class Sampled:
    """Wraps an oracle so that it samples answers instead of taking the most likely ones. Samples
    are independent of each other and of samples that the wrapped oracle draws."""

    def __init__(self, oracle: Oracle) -> None:
        version = f"{oracle.scorer.scorer_version}/sampled"
        self.scorer = oracle.scorer._replace(scorer_version=version)
        self.fingerprint = sha256_json([oracle.fingerprint, "sampled/2", RETRY_TEMPERATURE])
        self.facts = oracle.facts | {"temperature": RETRY_TEMPERATURE, "seed": "by text"}
        self.scale = oracle.scale
        self._oracle = oracle

    def label(self, questions: Iterable[Question]) -> Iterator[tuple[int, OracleResult]]:
        return self._oracle.label(question._replace(is_redrawn=True) for question in questions)


def label_parts(
    run: Run, job: LabelJob, oracles: Oracles
) -> Iterator[tuple[Documents, Path, Oracle]]:
    """Yield the parts of a job: documents, the directory of their labels, and the oracle.

    First all documents, then the sample that measures the oracle's noise: once with the dimensions
    in reverse order (if the rubric has several), once with sampled answers (if the oracle can
    sample).
    """
    yield job.documents, job.out_dir, oracles(run.rubric)
    if not job.relabel:
        return
    asked: dict[str, Oracle] = {}
    if len(run.rubric.dimensions) > 1:
        asked["order"] = oracles(run.rubric.turned())
    if run.config.oracle.kind != "heuristic":
        asked["sampling"] = Sampled(oracles(run.rubric))
    for kind, oracle in asked.items():
        name = NOISE_NAMES[kind]
        labelled = tuple(directory / name for directory in job.documents.labelled)
        sample = replace(job.documents.sample(job.relabel), labelled=labelled)
        yield sample, job.out_dir / name, oracle


def oracles_of(run: Run) -> Oracles:
    """A function that opens the run's oracle for a rubric, once per rubric."""
    return functools.cache(lambda rubric: make_oracle(run.config.oracle, rubric, run.resolve))


def nameless_oracles(run: Run) -> Oracles:
    """As `oracles_of`, but the oracles only give fingerprints and send no requests, so they need no
    key."""
    table = run.config.oracle
    if table.http is not None:
        table = table.model_copy(
            update={"http": table.http.model_copy(update={"api_key_env": None})}
        )
    return functools.cache(lambda rubric: make_oracle(table, rubric, run.resolve))


def label_documents(
    run: Run, job: LabelJob, oracles: Oracles, progress: Progress | None = None
) -> Result:
    """Label documents, and `job.relabel` of them again to measure noise. As `label_shard`, but the
    facts also name the `scorer` and count the documents `relabelled`."""
    table = run.config.oracle
    first, *again = label_parts(run, job, oracles)
    # If only the project file sets `replace`, labels that cost money survive a change of the
    # oracle: they are dropped only if the command itself asks for it.
    replace = table.replace and (run.is_given("oracle.replace") or "free")
    options = {"replace": replace, "max_retries": table.max_retries}
    made = label_shard(*first, progress=progress, **options)
    facts = made.facts | {"scorer": first[2].scorer.name}
    for part in again:
        # A sample is always replaced if it does not match the labels, which are current by now.
        options["replace"] = isinstance(part[2], Sampled) or replace
        facts["relabelled"] = label_shard(*part, **options).facts["total"]
    return Result(made.digest, facts)
