"""A run without a grader: writes one row per document, with the decision keep and no scores."""

from collections.abc import Iterator
from itertools import islice
from typing import Literal

from loader.files.format import Manifest, load_manifest
from nmoe_core.base.atomic import output_lock
from nmoe_core.base.errors import ConfigError
from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.base.result import Result
from nmoe_core.base.settings import GraderKind
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.quality.calibration.graded import PartialRows, Row, Tally, current_result, result_of
from nmoe_core.quality.grading import GRADE_CODE
from nmoe_core.shards.documents import document_ids
from nmoe_core.shards.manifest import documents_digest

_ROWS_AT_ONCE = 10_000


def require_grader(run: Run) -> GraderKind | Literal["auto"]:
    """The grader that the run names. Raises ConfigError if the run has no grader."""
    if (asked := run.config.grading.grader) == "none":
        raise ConfigError(
            "this run has no grader",
            where=run.path,
            found='[grading] grader = "none"',
            do="set [grading] grader to student, auto or hydra",
        )
    return asked


def keep_documents(shard: ShardPaths) -> Result:
    """Write the rows and the summary of a shard, unless they are current. Facts as
    `grade_documents`."""
    manifest = load_manifest(shard.manifest)
    out_dir = shard.graded
    fingerprints = keep_fingerprints(documents_digest(manifest))
    if (current := current_result(out_dir, fingerprints)) is not None:
        return current
    with output_lock(out_dir), PartialRows(out_dir, fingerprints) as partial:
        tally = Tally(0.0, None)
        for rows in _batches(shard, manifest, partial.resume(tally)):
            partial.append(rows)
            tally.add(rows)
        facts = {**tally.facts(), "grader": "none", "fingerprints": fingerprints}
        return result_of(partial.commit(facts), 0, 0, changed=True)


def keep_fingerprints(documents: str) -> Fingerprints:
    """Fingerprints of the rows of a shard in a run without a grader, from the digest of its
    documents."""
    return {"code": GRADE_CODE, "shard": documents, "grader": "none"}


def _batches(shard: ShardPaths, manifest: Manifest, start: int) -> Iterator[list[Row]]:
    ids = islice(document_ids(shard.tree.data, manifest), start, None)
    unscored = {"scores": None, "aggregated": None, "decision": "keep"}
    unscored |= {"q_probe": None, "early_exit": False, "probe_scores": None}
    while batch := list(islice(ids, _ROWS_AT_ONCE)):
        yield [{"doc_id": str(one), "source": shard.source, **unscored} for one in batch]
