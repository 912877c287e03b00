"""`nmoe takedown`: a list becomes documents, a record, and curated shards without them."""

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from loader.loader import DeterministicLoader
from loader.plan.file import load_plan
from loader.rows.origins import Place, readings
from loader.rows.stream import Stream
from nmoe_core.base.docid import bucket_of
from nmoe_core.base.fingerprint import read_summary
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.curate.takedown.record import record_digest
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks import curate
from nmoe_core.tasks.preview import plan_run
from nmoe_core.tasks.selection.outcome import left_out, why_left_out
from nmoe_core.tasks.takedown.readings import Readings, readings_of
from tests.core.audit.takedown.corpus import (
    BUCKETS,
    FORMAT,
    Texts,
    command_of,
    copies_of,
    curated_again,
    curated_ids,
    digest_of,
    listed,
    run_of,
    shared_grams,
    shared_with,
    written,
)
from tests.core.curate.corpus import Corpus
from tests.project import contents, failing, said
from tests.refusals import refused_line

pytestmark = pytest.mark.usefixtures("fixed_clock")


@pytest.mark.parametrize("seed", range(4))
def test_what_is_taken_down_leaves_curated_shards_and_the_proof_is_that_of_brute_force(
    seed: int, made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, texts = made
    rng = np.random.default_rng(seed)
    named = [f"doc-{i:04d}" for i in rng.choice(len(texts), 12, replace=False)]
    named += [] if seed else ["doc-0007", "doc-0011"]
    gone, path = copies_of(texts, named), listed(corpus, *(f"id:{name}" for name in named))
    assert len(gone) > len(named) or seed > 0
    found = said(capsys, *command_of(run, path, "--apply"))
    assert found["recorded"] == len(gone)
    failed = said(capsys, *command_of(run, path, "--verify"), status=1)
    assert {row["ingest_id"] for row in failed["remaining"]} == gone
    sharing = shared_grams(texts, gone)
    assert {row["ingest_id"]: row["grams"] for row in failed["shared"]} == sharing
    for row in failed["shared"]:
        counts = shared_with(texts[row["ingest_id"]].tolist(), [texts[name] for name in gone])
        assert row["texts"] == len(counts)
        assert counts[row["text_sha256"]] == max(counts.values())
    touched = {bucket_of(name, BUCKETS) for name in gone}
    assert curated_again(run) == [bucket in touched for bucket in range(BUCKETS)]
    assert curated_ids(corpus) == sorted(texts.keys() - gone)
    status = 1 if sharing else 0
    proof = said(capsys, *command_of(run, path, "--verify"), status=status)
    assert proof["remaining"] == []
    assert {row["ingest_id"]: row["grams"] for row in proof["shared"]} == sharing
    allowed = said(capsys, *command_of(run, path, "--verify", "--allow-shared"))
    assert allowed["holds"]
    assert allowed["tokens"] == sum(len(texts[name]) + 1 for name in texts.keys() - gone)
    raw = said(capsys, *command_of(run, path, "--verify", "--allow-shared", "--raw"), status=1)
    assert {row["ingest_id"] for row in raw["remaining"]} == gone
    assert {row["tree"] for row in raw["remaining"]} == {"data"}


def test_the_report_names_documents_readings_and_states_and_writes_nothing(
    made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, texts = made
    names = ["doc-0003", "doc-0010", "doc-0100"]
    path = listed(corpus, *(f"id:{name}" for name in names), "id:nowhere")
    plan = load_plan(run.tree.plan)
    state = corpus.root.parent / "state.json"
    with DeterministicLoader(plan, backend="numpy") as loader:
        for _ in range(12):
            next(loader)
        state.write_text(json.dumps(loader.state_dict()))
    before = contents(corpus.root.parent)
    facts = said(capsys, *command_of(run, path, "--state", state))
    assert main(command_of(run, path)) == 0
    assert contents(corpus.root.parent) == before
    gone = copies_of(texts, names)
    assert {row["ingest_id"] for row in facts["documents"]} == gone
    copies = {row["ingest_id"] for row in facts["documents"] if row["is_copy"]}
    assert copies == gone - set(names)
    assert facts["unmatched"] == ["id:nowhere"]
    read = {row["doc_id"]: row for row in facts["readings"]}
    stream, num_passed = Stream(plan, "train"), 0
    for row in (row for row in facts["documents"] if row["tree"] == "curated"):
        rel, start, end = re.fullmatch(r"web//(.+)#s=(\d+):e=(\d+)", row["doc_id"]).groups()
        place = Place("web", run.tree.curated / rel, int(start), int(end))
        held = list(readings(stream, [place]))
        found = read.pop(row["doc_id"], None)
        assert (found is None) == (not held)
        if found is not None:
            keys = ("first_sequence", "last_sequence", "sequences", "first_step")
            steps = held[0] // plan.batch_size
            assert [found[key] for key in keys] == [held[0], held[-1], len(held), steps]
            assert found["states"] == ([str(state)] if held[0] < 12 * plan.batch_size else [])
            num_passed += bool(found["states"])
    assert read == {}
    number = {"sequence": 12 * plan.batch_size, "step": 12, "documents_read": num_passed}
    assert facts["states"] == [{"state": str(state), **number}]
    touched = sorted({bucket_of(name, BUCKETS) for name in gone})
    assert facts["rebuild"]["curate"] == [f"web/train/shard_{bucket:04d}" for bucket in touched]


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("wraps", [False, True])
def test_readings_of_many_documents_are_those_of_each(
    made: tuple[Corpus, Run, Texts], packing: str, wraps: bool
) -> None:
    _, run, _ = made
    settings = {"packing": packing, "on_exhaust": "wrap" if wraps else "error"}
    settings |= {"mixture_toml": str(run.base / "mixture.toml")}
    text = (run.base / "mixture.toml").read_text()
    (run.base / "mixture.toml").write_text(text.replace("1e-05", "4e-05") if wraps else text)
    run = run.with_settings(settings)
    curate.make_plan(run, ["web"], [])
    plan = load_plan(run.tree.plan)
    stream = Stream(plan, "train")
    places = []
    for file, path in enumerate(stream.files.paths()):
        ends = [0, *stream.index.ends(file).tolist()]
        places += [Place("web", path, a, b) for a, b in pairwise(ends)][::5]
    found = readings_of(stream, places)
    assert found
    for place in places:
        held = list(readings(stream, [place]))
        expected = Readings(held[0], held[-1], len(held)) if held else None
        assert found.get(place) == expected


def test_later_shards_are_named_where_windows_are_filled(
    made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, _, texts = made
    run = run_of(corpus, order="window_fill")
    curated_again(run)
    name = next(
        name
        for name, tokens in texts.items()
        if bucket_of(name, BUCKETS) == 1 and copies_of(texts, [name]) == {name} and len(tokens) % 32
    )
    path = listed(corpus, f"sha256:{digest_of(texts[name])}")
    again = said(capsys, *command_of(run, path, "--apply"))["rebuild"]
    assert again["curate"] == ["web/train/shard_0001"]
    assert again["later"] == ["web/train/shard_0002", "web/train/shard_0003"]
    curated = plan_run(run, run_sources(run)).curated["web"]
    assert curated["shard_0001"] == "input the takedown record"
    assert curated_again(run) == [False, True, True, True]
    assert curated_again(run) == [False] * BUCKETS


@pytest.mark.parametrize("url", ["", "s3://me:secret@bucket/corpus"])
def test_every_step_says_that_stores_and_exports_are_not_covered_and_what_to_do(
    made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str], url: str
) -> None:
    corpus, run, _ = made
    run.path.write_text(f'{run.path.read_text()}\n[publish]\nurl = "{url}"\n')
    path = listed(corpus, "id:doc-0001")
    store = "s3://[hidden]@bucket/corpus" if url else None
    named = f"nmoe publish {run.tree.plan} {store}" if store else "nmoe export, nmoe publish"
    for flags in ([], ["--apply"], ["--verify"]):
        main(command_of(run, path, *flags))
        (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("not covered")]
        assert line.endswith(named)
        facts = said(capsys, *command_of(run, path, *flags), status=int("--verify" in flags))
        assert facts["published"] == store
        assert ", ".join(facts["not_covered"]) in line
        for place in ("exports", "input files", "labels", "caches of loaders", "event log"):
            assert place in line
        assert str(run.tree.seen) in line
        assert ("data shards and their kept versions" in line) == ("--verify" in flags)


def _label(run: Run, name: str, corpus: Corpus, texts: Texts, *, is_cut: bool) -> list[Path]:
    """Labels of a document as the oracle's, merged and kept ones: its hash is of the text that the
    oracle was shown, which may be the beginning alone."""
    shard = corpus.shard(bucket_of(name, BUCKETS))
    number = corpus.ingest_ids(shard.bucket).index(name)
    record = {"doc_id": corpus.doc_ids(shard.bucket)[number], "source": "web", "ok": True}
    record |= {"snippet": "its text", "text_sha256": "f" * 64 if is_cut else digest_of(texts[name])}
    # The document lay elsewhere when its label was kept, which its text tells alone.
    kept = record if is_cut else record | {"doc_id": "web//elsewhere"}
    other = record | {"doc_id": "web//another", "text_sha256": "e" * 64}
    directory = run.tree.label_shard("train", 3)
    paths = [run.tree.merged_labels("train"), directory / "scores.jsonl"]
    paths += [directory / "relabelled" / "scores.jsonl", directory / "known.jsonl"]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [kept if path.name == "known.jsonl" else record, other]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run.tree.labels / "corrections.jsonl").write_text('{"doc_id": "web//another"}\n')
    return paths


@pytest.mark.parametrize("is_cut", [False, True])
def test_labels_are_named_by_the_record_when_no_shard_holds_the_document_any_more(
    made: tuple[Corpus, Run, Texts],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    is_cut: bool,
) -> None:
    corpus, run, texts = made
    gone = copies_of(texts, ["doc-0001"])
    files = _label(run, "doc-0001", corpus, texts, is_cut=is_cut)
    expected = {path.relative_to(run.tree.labels).as_posix(): 1 for path in files}
    path = listed(corpus, "id:doc-0001")
    assert said(capsys, *command_of(run, path))["labels"] == expected
    said(capsys, *command_of(run, path, "--apply"))
    curated_again(run)
    less = written(tmp_path / "less", {name: texts[name] for name in texts.keys() - gone})
    corpus.data.rename(tmp_path / "before")
    less.data.rename(corpus.data)
    by_hash = listed(corpus, f"sha256:{digest_of(texts['doc-0001'])}")
    for flags in (["--verify", "--allow-shared"], []):
        facts = said(capsys, *command_of(run, by_hash, *flags))
        assert facts["labels"] == expected
        assert main(command_of(run, by_hash, *flags)) == 0
        line = f"labels: {len(files)} records are about these documents, in "
        assert line in capsys.readouterr().out
    assert facts["labelled"] == 1
    assert facts["documents"] == []
    assert read_summary(run.tree.takedown_proof)["labels"] == expected
    others = said(capsys, *command_of(run, listed(corpus, "id:doc-0100")))
    assert others["labels"] == {}


def test_a_reason_says_takedown_and_curated_shards_verify(
    made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, texts = made
    assert record_digest(run.tree, "web") is None
    said(capsys, *command_of(run, listed(corpus, "id:doc-0001"), "--apply"))
    assert record_digest(run.tree, "web") is not None
    assert record_digest(run.tree, "books") is None
    curated_again(run)
    bucket = bucket_of("doc-0001", BUCKETS)
    number = corpus.ingest_ids(bucket).index("doc-0001")
    assert left_out(run, ["web"]) == {"takedown": {"web": len(copies_of(texts, ["doc-0001"]))}}
    assert why_left_out(run, corpus.shard(bucket), [number]) == {number: "takedown"}
    others = texts.keys() - copies_of(texts, ["doc-0001"])
    assert corpus.verify(bucket) == sum(bucket_of(name, BUCKETS) == bucket for name in others)
    explained = said(capsys, "explain", corpus.doc_ids(bucket)[number], "--config", run.path)
    assert explained["curated"] == {"is_included": False}


def test_a_copy_that_comes_later_is_left_out_too(
    made: tuple[Corpus, Run, Texts], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, texts = made
    said(capsys, *command_of(run, listed(corpus, "id:doc-0001"), "--apply"))
    grown = written(tmp_path / "grown", texts | {"new": texts["doc-0001"], "own": np.arange(80)})
    run = run_of(grown)
    grown.fit()
    for bucket in range(BUCKETS):
        grown.assign(bucket)
        grown.grade(bucket, lambda i: "keep")
    (grown.root / "takedown").mkdir()
    for name in ("documents.jsonl", "grams.npy", "letters.npy"):
        (grown.root / "takedown" / name).write_bytes((corpus.root / "takedown" / name).read_bytes())
    curated_again(run)
    assert {"new", "doc-0001"}.isdisjoint(curated_ids(grown))
    assert "own" in curated_ids(grown)
    path = listed(grown, "id:new")
    assert said(capsys, *command_of(run, path, "--verify", "--allow-shared"))["remaining"] == []


def test_a_document_that_curated_shards_alone_still_hold_is_found(
    made: tuple[Corpus, Run, Texts], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, texts = made
    gone = copies_of(texts, ["doc-0001"])
    less = written(tmp_path / "less", {name: texts[name] for name in texts.keys() - gone})
    corpus.data.rename(tmp_path / "before")
    less.data.rename(corpus.data)
    facts = said(capsys, *command_of(run, listed(corpus, "id:doc-0001")))
    found = {(row["tree"], row["ingest_id"]) for row in facts["documents"]}
    assert found == {("curated", name) for name in gone}
    assert facts["rebuild"]["curate"]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_kill_between_the_files_of_a_record_leaves_it_as_it_was(
    step: int, made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, texts = made
    said(capsys, *command_of(run, listed(corpus, "id:doc-0001"), "--apply"))
    curated_again(run)
    before = (corpus.root / "takedown" / "documents.jsonl").read_bytes()
    path = listed(corpus, "id:doc-0002", "id:doc-0003")
    with failing(f"rename:{step}:EIO"):
        assert main(command_of(run, path, "--apply")) == 1
    assert (corpus.root / "takedown" / "documents.jsonl").read_bytes() == before
    assert curated_again(run) == [False] * BUCKETS
    assert "not recorded" in refused_line(capsys, *command_of(run, path, "--verify"))
    path = listed(corpus, "id:doc-0004")
    count = len(copies_of(texts, ["doc-0004"]))
    assert said(capsys, *command_of(run, path, "--apply"))["added"] == count
    assert said(capsys, *command_of(run, path, "--apply"))["added"] == 0
    curated_again(run)
    assert said(capsys, *command_of(run, path, "--verify", "--allow-shared"))["texts"] == 2


def test_a_kill_between_record_and_rebuild_is_told_and_the_rebuild_goes_on(
    made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, texts = made
    names = ["doc-0001", "doc-0002", "doc-0003", "doc-0005"]
    path = listed(corpus, *(f"id:{name}" for name in names))
    said(capsys, *command_of(run, path, "--apply"))
    touched = {bucket_of(name, BUCKETS) for name in copies_of(texts, names)}
    assert len(touched) > 1
    with failing("rename:4:EIO"), pytest.raises(OSError, match="Input/output"):
        curated_again(run)
    line = refused_line(capsys, *command_of(run, path, "--verify"), code="E-TAKEDOWN-LEFT")
    assert "documents that remain" in line
    curated_again(run)
    assert said(capsys, *command_of(run, path, "--verify", "--allow-shared"))["holds"]


def test_a_flag_of_another_step_is_refused(
    made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, _ = made
    path, plan = listed(corpus, "id:doc-0001"), run.tree.plan
    for flags, where in (
        (["--raw"], "with --verify"),
        (["--verify", "--by", "me"], "with --apply"),
        (["-o", plan], "with --mask"),
        (["--apply", "--plan", plan], "without --apply"),
    ):
        assert where in refused_line(capsys, *command_of(run, path, *flags))
    assert not run.tree.takedown.exists()


def test_a_masked_plan_puts_eos_in_the_place_of_documents_and_takes_states_of_the_old(
    made: tuple[Corpus, Run, Texts], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, texts = made
    plan, out = run.tree.plan, tmp_path / "masked.json"
    path = listed(corpus, "id:doc-0100")
    facts = said(capsys, *command_of(run, path, "--mask", plan, "-o", out))
    assert facts["masked"] == len(copies_of(texts, ["doc-0100"]))
    with DeterministicLoader(load_plan(plan), backend="numpy") as loader:
        next(loader)
        state = loader.state_dict()
        rows = [np.array(batch[0]) for batch in loader]
    with DeterministicLoader(load_plan(out), backend="numpy") as loader:
        loader.load_state_dict(state)
        masked = [np.array(batch[0]) for batch in loader]
    differing = [(a, b) for a, b in zip(rows, masked, strict=True) if not np.array_equal(a, b)]
    assert differing
    assert all((b[a != b] == FORMAT.eos_token_id).all() for a, b in differing)
    assert "-o PLAN" in refused_line(capsys, *command_of(run, path, "--mask", plan))
    path, out = listed(corpus, "id:nowhere"), tmp_path / "none.json"
    refused_line(capsys, *command_of(run, path, "--mask", plan, "-o", out))
    assert not out.exists()


def test_shards_with_documents_that_are_taken_down_are_neither_exported_nor_published(
    made: tuple[Corpus, Run, Texts], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, _ = made
    manifest = run.tree.curated_manifest("web")
    copies = {"export": ["export", "megatron", manifest, "--output", tmp_path / "exported"]}
    copies["publish"] = ["publish", run.tree.plan, f"file://{tmp_path}/published"]
    said(capsys, *command_of(run, listed(corpus, "id:doc-0001"), "--apply"))
    for words in copies.values():
        line = refused_line(capsys, *map(str, words), code="E-TAKEDOWN-LEFT")
        assert "recorded as taken down" in line
    assert sorted(tmp_path.iterdir()) == [corpus.root.parent / "gone.txt", corpus.root]
    assert main(["verify", str(run.tree.plan)]) == 0
    assert "E-TAKEDOWN-LEFT" in capsys.readouterr().err
    curated_again(run)
    for words in copies.values():
        assert main([*map(str, words)]) == 0
    assert main(["verify", str(run.tree.plan)]) == 0
    assert "E-TAKEDOWN-LEFT" not in capsys.readouterr().err
    data = run.tree.manifest("web")
    raw = ["export", "olmo", str(data), "--output", str(tmp_path / "raw")]
    refused_line(capsys, *raw, code="E-TAKEDOWN-LEFT")
