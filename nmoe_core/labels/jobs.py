"""Labelling as a run asks for it: which documents, into which directory, by which oracle."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from nmoe_core.base.errors import ConfigError
from nmoe_core.base.result import Result
from nmoe_core.config.rubric import Rubric
from nmoe_core.config.run import Run
from nmoe_core.labels.agreement import RELABELLED_NAME
from nmoe_core.labels.documents import Documents, shard_documents
from nmoe_core.labels.label import Progress, label_shard
from nmoe_core.labels.oracle import Oracle
from nmoe_core.labels.oracles import make_oracle
from nmoe_core.labels.slices import LABEL_SHARDS, combine_slices
from nmoe_core.text.tokenizer import load_tokenizer

Oracles = Callable[[Rubric], Oracle]


class LabelJob(NamedTuple):
    """Documents to label into a directory, the first `relabel` of a sample of them twice."""

    name: str
    documents: Documents
    out_dir: Path
    relabel: int


def slice_jobs(
    run: Run, sources: Sequence[str], keys: Sequence[str] | None = None
) -> Iterator[LabelJob]:
    """The documents of slices, by default of all, and where their labels belong; ConfigError where
    there is no such slice."""
    known = {f"{split}-{i:02d}": (split, i) for split, i in LABEL_SHARDS}
    for key in keys or ():
        if key not in known:
            expected = f"{next(iter(known))} to {next(reversed(known))}"
            raise ConfigError("no such slice", found=key, expected=expected)
    tree, table = run.tree, run.config.oracle
    combine_slices(tree, sources)
    tokenizer = load_tokenizer(run.tokenizer)
    labelled = tuple(tree.label_shard(*shard) for shard in known.values())
    for key in known if keys is None else keys:
        slice_file = tree.slice(*known[key])
        documents = shard_documents(slice_file, tree.data, tokenizer, table.max_doc_tokens)
        relabel = table.relabel if known[key][0] == "val" else 0
        documents = replace(documents, labelled=labelled)
        yield LabelJob(key, documents, tree.label_shard(*known[key]), relabel)


def second_labels(job: LabelJob) -> tuple[Documents, Path]:
    """The sample to label twice, and the directory of its second labels."""
    labelled = tuple(directory / RELABELLED_NAME for directory in job.documents.labelled)
    sample = replace(job.documents.sample(job.relabel), labelled=labelled)
    return sample, job.out_dir / RELABELLED_NAME


def oracles_of(run: Run) -> Oracles:
    """The run's oracle for a rubric, opened once per rubric."""
    return functools.cache(lambda rubric: make_oracle(run.config.oracle, rubric, run.resolve))


def label_documents(
    run: Run, job: LabelJob, oracles: Oracles, progress: Progress | None = None
) -> Result:
    """Label documents, and `job.relabel` of them again with the rubric turned round; as
    `label_shard`, but the facts also name the `scorer` and count those `relabelled`."""
    table, oracle = run.config.oracle, oracles(run.rubric)
    options = {"replace": table.replace, "retry_failed": table.retry_failed}
    made = label_shard(job.documents, job.out_dir, oracle, progress=progress, **options)
    facts = made.facts | {"scorer": oracle.scorer.name}
    if job.relabel:
        again = label_shard(*second_labels(job), oracles(run.rubric.turned()), **options)
        facts["relabelled"] = again.facts["total"]
    return Result(made.digest, facts)
