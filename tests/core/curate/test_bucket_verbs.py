"""Verbs that trace, compare and change plans, if the plan's sources are buckets."""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from loader import LossLog, open_loader
from loader.files.format import load_manifest
from loader.plan.file import load_plan
from loader.rows.origins import origins
from loader.rows.stream import Stream
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks import curate
from nmoe_core.tasks.preview import plan_run
from nmoe_core.tasks.selection.bucket_plan import bucket_paths
from tests.core.curate.bucketed import SETTINGS, SOURCES, bucket_project, curated
from tests.project import Project, said
from tests.refusals import refused, refused_line

pytest.importorskip("duckdb")

Reads = dict[str, tuple[str, list[int]]]
_SETTINGS = SETTINGS | {"shuffle": True}  # a plan that wraps needs it to have a twin


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = bucket_project(tmp_path_factory.mktemp("verbs"), _SETTINGS)
    curated(made)
    return made


@pytest.fixture
def stream(project: Project) -> Iterator[Stream]:
    with closing(Stream(load_plan(project.run.tree.plan), "train")) as opened:
        yield opened


def _reads(stream: Stream) -> Reads:
    """The bucket and the sequences of each document that the plan reads, by its ingest id."""
    found: Reads = {}
    ids: dict[Path, list[str]] = {}
    for n in range(stream.num_sequences):
        row = origins(stream, n)
        for part in row.documents:
            if part.path not in ids:
                lines = part.path.with_suffix(".ids.jsonl").read_text().splitlines()
                ids[part.path] = [json.loads(line)["id"] for line in lines]
            held = found.setdefault(ids[part.path][part.document], (row.source, []))
            held[1].extend([n] * (n not in held[1]))
    return found


def _weights(project: Project, tmp_path: Path, **special: float) -> Path:
    names = [name for source in SOURCES for name in bucket_paths(project.run, source)]
    own = dict.fromkeys(names, 1.0) | special
    rows = "".join(f"{json.dumps(name)} = {weight}\n" for name, weight in own.items())
    path = tmp_path / "weights.toml"
    path.write_text(f"[weights]\n{rows}")
    return path


def test_explain_and_seen_name_the_bucket_and_the_steps_of_a_document(
    project: Project, stream: Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    reads = _reads(stream)
    rows = [json.loads(x) for x in (project.directory / "in/web.jsonl").read_text().splitlines()]
    long = [row for row in rows if len(row["text"].split()) > 30 and row["id"] in reads][::6]
    assert main(["seen", "--index", "--config", str(project.config)]) == 0
    assert len({reads[row["id"]][0] for row in long}) > 2
    for row in long:
        bucket, sequences = reads[row["id"]]
        facts = said(capsys, "explain", row["id"], "--config", project.config)
        assert facts["curated"]["bucket"] == bucket
        assert [one["sequence"] for one in facts["readings"]] == sequences[:8]
        facts = said(capsys, "seen", row["text"], "--config", project.config)
        (hit,) = facts["hits"]
        assert hit["ingest_id"] == row["id"]
        assert hit["doc_id"].startswith("web//web/train/")
        assert facts["first_step"] == sequences[0] // 4
    assert main(["explain", long[0]["id"], "--config", str(project.config)]) == 0
    assert f"bucket {reads[long[0]['id']][0]}" in capsys.readouterr().out


def test_sql_and_exposure_count_the_documents_of_each_bucket(
    project: Project, stream: Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    run = project.run
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for source in SOURCES:
        for shard in run.tree.shards(source, 2):
            for name in pq.read_table(shard.buckets)["bucket"].to_pylist():
                counts[source, name] += 1
    query = "select source, bucket, count(*) from documents group by all"
    found = said(capsys, "sql", query, "--config", project.config)
    assert {(a, b): n for a, b, n in (row.values() for row in found)} == counts
    refused_line(capsys, "select", "--where", "bucket = 'en/q1'", "--config", str(project.config))
    of_bucket: dict[str, int] = defaultdict(int)
    stop = stream.num_sequences // 4 * 4
    for bucket, sequences in _reads(stream).values():
        of_bucket[bucket] += sequences[0] < stop
    found = said(capsys, "exposure", "--config", project.config)
    read = {row["source"]: row["documents_read"] for row in found["groups"]}
    assert {name: count for name, count in read.items() if count} == of_bucket


def test_a_plan_of_buckets_is_remixed_compared_and_joined_to_losses(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = load_plan(project.run.tree.plan)
    names = [source.name for source in plan.sources]
    assert "books/de~2Fat/q1" in names
    weights = ",".join(f"{name}={1 + name.startswith('books')}" for name in names)
    before, after = project.run.tree.plan, project.run.tree.plan.with_name("next.json")
    facts = said(capsys, "remix", before, "--step", 40, "--weights", weights, "-o", after)
    assert facts["step"] == 40
    stage = load_plan(after).stages[-1]
    assert {s.name: s.weight for s in stage.sources}.keys() == set(names)
    facts = said(capsys, "diff", before, after)
    assert facts["first_step"] == 40
    assert {row["source"] for row in facts["sources"]} == set(names)
    with (
        open_loader(after, form="batch", backend="numpy", rank=0, world_size=1) as loader,
        closing(LossLog(tmp_path / "losses", loader.plan)) as log,
    ):
        for step, batch in zip(range(60), loader):
            log.add(step, batch.sequence_index, batch.source_index.astype(np.float64))
    facts = said(capsys, "losses", tmp_path / "losses", "--plan", after)
    for row in facts["groups"]:
        assert row["loss"] in (None, pytest.approx(names.index(row["source"])))


def test_a_twin_of_buckets_reads_the_same_documents(
    project: Project, tmp_path: Path, stream: Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    other = bucket_project(tmp_path / "other", _SETTINGS)
    run = curated(other)
    paths = {name: path for source in SOURCES for name, path in bucket_paths(run, source).items()}
    given = [f"--source={name}={path}" for name, path in paths.items()]
    output = tmp_path / "twin.json"
    said(capsys, "twin", project.run.tree.plan, *given, "--seq-len", 20, "-o", output)
    with closing(Stream(load_plan(output), "train")) as twin:
        assert _reads(twin) == _reads(stream)


def test_a_document_of_a_bucket_is_masked(project: Project, tmp_path: Path, stream: Stream) -> None:
    reads = _reads(stream)
    chosen = next(name for name, (bucket, _) in reads.items() if bucket == "books/de~2Fat/q1")
    (tmp_path / "list.txt").write_text(f"id:{chosen}\n")
    output = project.run.tree.plan.with_name("masked.json")
    arguments = ["takedown", tmp_path / "list.txt", "--mask", project.run.tree.plan]
    arguments += ["-o", output, "--config", project.config]
    assert main([*map(str, arguments)]) == 0
    (row,) = load_plan(output).masked
    assert row.source == "books/de~2Fat/q1"


def test_small_runs_name_a_bucket_with_too_few_documents_and_the_remedy(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused_line(capsys, "mix", "--config", str(project.config), code="E-MIX-TEXT")
    assert "source 'web/" in line
    assert "least_tokens" in line


def test_weights_of_buckets_are_previewed_and_too_small_ones_are_refused_with_a_remedy(
    project: Project, tmp_path: Path
) -> None:
    sizes = {}
    for source in SOURCES:
        for name, path in bucket_paths(project.run, source).items():
            sizes[name] = load_manifest(path).total_tokens
    path = _weights(project, tmp_path)
    run = Run(project.config, {"mixture.weights": str(path)})
    epochs = plan_run(run, run_sources(run)).epochs
    assert epochs.keys() == sizes.keys()
    plan, _ = curate.planned_loader(run, SOURCES, [])
    for name, count in plan.taken().items():
        assert epochs[name][0] == pytest.approx(count * 16 / sizes[name], abs=0.05)
    _weights(project, tmp_path, **{"web/en/q1": 1e-9})
    with refused("E-PLAN-ZERO", naming=["web/en/q1", "least_tokens", "weight 0"]):
        curate.planned_loader(run, SOURCES, [])
