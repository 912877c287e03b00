"""`nmoe takedown`: a list becomes documents, a record, curated shards without them, and a proof."""

import hashlib
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader.loader import DeterministicLoader
from loader.plan.file import load_plan
from loader.rows.origins import Place, readings
from loader.rows.stream import Stream
from nmoe_core.audit.takedown import proof
from nmoe_core.base.docid import bucket_of
from nmoe_core.base.fingerprint import read_summary
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.curate.takedown.grams import GRAMS
from nmoe_core.curate.takedown.record import record_digest
from nmoe_core.prep.mixture import run_sources
from nmoe_core.shards.manifest import ShardFormat, combine_shards
from nmoe_core.shards.writer import ShardWriter
from nmoe_core.tasks import curate
from nmoe_core.tasks.preview import plan_run
from nmoe_core.tasks.selection.outcome import left_out, why_left_out
from nmoe_core.tasks.takedown import report
from nmoe_core.tasks.takedown.readings import Readings, readings_of
from tests.core.curate.corpus import Corpus
from tests.project import contents, failing, said
from tests.refusals import refused, refused_line

BUCKETS = 4
GRAM = 50
FORMAT = ShardFormat("web", "v1", "o200k_harmony", 201088, 199999, "fingerprint")
Texts = dict[str, np.ndarray]


def _digest(tokens: np.ndarray) -> str:
    return hashlib.sha256(tokens.astype("<u4").tobytes()).hexdigest()


def _write(root: Path, texts: Texts) -> Corpus:
    """A corpus of these texts, by ingest id, with topics and grades; all are kept."""
    corpus = Corpus(root, num_buckets=BUCKETS)
    shards = corpus.tree.shards("web", BUCKETS)
    writers = [ShardWriter(shard.directory, FORMAT, 4000) for shard in shards]
    for name, tokens in texts.items():
        digest = _digest(tokens)
        writers[bucket_of(name, BUCKETS)].add_document(tokens.astype(np.uint32), name, digest)
    info = {"source": "web", "assignment": "md5"}
    for writer in writers:
        writer.finish({"source": "texts"}, info)
    manifest = combine_shards(corpus.tree.split("web"), FORMAT, BUCKETS, info)
    corpus.tree.manifest("web").write_text(json.dumps(manifest))
    return corpus


def _texts(seed: int, count: int = 220) -> Texts:
    """Random documents of 0 to 120 tokens: most of their own, some with passages of a common pool,
    some copies of others."""
    rng = np.random.default_rng(seed)
    pool = [rng.integers(0, 1200, 70) for _ in range(3)]
    texts: Texts = {}
    for i in range(count):
        tokens = rng.integers(0, 1200, rng.integers(3, 120))
        if i % 7 == 0:
            place = int(rng.integers(0, len(tokens)))
            tokens = np.insert(tokens, place, pool[int(rng.integers(3))])
        if i % 11 == 10:
            tokens = texts[f"doc-{rng.integers(i):04d}"]
        if i % 13 == 12:  # a short text inside another one
            tokens = np.insert(tokens, 1, texts[f"doc-{i - 1:04d}"][:9])
            texts[f"doc-{i - 1:04d}"] = texts[f"doc-{i - 1:04d}"][:9]
        texts[f"doc-{i:04d}"] = tokens
    return texts


@pytest.fixture(autouse=True)
def fixed_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Texts]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        texts = _texts(0)
        corpus = _write(tmp_path_factory.mktemp("made") / "run", texts)
        run = _run(corpus)
        corpus.fit()
        for bucket in range(BUCKETS):
            corpus.assign(bucket)
            corpus.grade(bucket, lambda i: "keep")
        _curate(run)
    return corpus, texts


def _run(corpus: Corpus, **curation: Any) -> Run:
    run = corpus.configure({"order": "golden", **curation}, seq_len=32)
    text = run.path.read_text()
    if "num_shards = 2" in text:
        run.path.write_text(text.replace("num_shards = 2", f"num_shards = {BUCKETS}"))
    return Run(run.path)


def _curate(run: Run) -> list[bool]:
    """Curate, combine and plan; whether each shard was made again."""
    made = curate.curate_shards(run, "web", range(BUCKETS), picture=False)
    curate.combine(run, "web", picture=False)
    curate.make_plan(run, ["web"], [])
    return [bool(made[bucket].facts["changed"]) for bucket in range(BUCKETS)]


@pytest.fixture
def made(made_once: tuple[Corpus, Texts], tmp_path: Path) -> tuple[Corpus, Run, Texts]:
    corpus = made_once[0].copied(tmp_path / "run")
    return corpus, Run(corpus.root / "run.toml"), made_once[1]


def _list(corpus: Corpus, *lines: str) -> Path:
    path = corpus.root.parent / "gone.txt"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def _command(run: Run, path: Path, *flags: object) -> list[str]:
    return ["takedown", str(path), "--config", str(run.path), *map(str, flags)]


def _copies(texts: Texts, names: Sequence[str]) -> set[str]:
    """The ingest ids with the texts of these."""
    gone = {_digest(texts[name]) for name in names}
    return {name for name, tokens in texts.items() if _digest(tokens) in gone}


def _curated_ids(corpus: Corpus) -> list[str]:
    return sorted(n for b in range(BUCKETS) for n in corpus.ingest_ids(b, corpus.curated))


def _grams(tokens: np.ndarray) -> Iterator[tuple[int, ...]]:
    length, values = min(GRAM, len(tokens)), tokens.tolist()
    return (tuple(values[i : i + length]) for i in range(len(values) - length + 1) if length)


def _sharing(texts: Texts, gone: set[str]) -> dict[str, int]:
    """The number of grams of texts that go in each document that stays, by brute force."""
    by_length: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for name in gone:
        for gram in _grams(texts[name]):
            by_length[len(gram)].add(gram)
    found = {}
    for name, tokens in texts.items():
        values = tokens.tolist()
        held = {
            gram
            for length, grams in by_length.items()
            for i in range(len(values) - length + 1)
            if (gram := tuple(values[i : i + length])) in grams
        }
        if name not in gone and held:
            found[name] = len(held)
    return found


def _shared_with(values: list[int], gone: Sequence[np.ndarray]) -> dict[str, int]:
    """The number of grams of each of some texts, by digest, that a document holds; none is 0."""
    found = {}
    for text in gone:
        grams, length = set(_grams(text)), min(GRAM, len(text))
        windows = {tuple(values[i : i + length]) for i in range(len(values) - length + 1)}
        if held := len(grams & windows):
            found[_digest(text)] = held
    return found


@pytest.mark.parametrize("seed", range(4))
def test_what_is_taken_down_leaves_curated_shards_and_the_proof_is_that_of_brute_force(
    seed: int, made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, texts = made
    rng = np.random.default_rng(seed)
    named = [f"doc-{i:04d}" for i in rng.choice(len(texts), 12, replace=False)]
    named += [] if seed else ["doc-0007", "doc-0011"]
    gone, path = _copies(texts, named), _list(corpus, *(f"id:{name}" for name in named))
    assert len(gone) > len(named) or seed > 0
    found = said(capsys, *_command(run, path, "--apply"))
    assert found["recorded"] == len(gone)
    failed = said(capsys, *_command(run, path, "--verify"), status=1)
    assert {row["ingest_id"] for row in failed["remaining"]} == gone
    sharing = _sharing(texts, gone)
    assert {row["ingest_id"]: row["grams"] for row in failed["shared"]} == sharing
    for row in failed["shared"]:
        counts = _shared_with(texts[row["ingest_id"]].tolist(), [texts[name] for name in gone])
        assert row["texts"] == len(counts)
        assert counts[row["text_sha256"]] == max(counts.values())
    touched = {bucket_of(name, BUCKETS) for name in gone}
    assert _curate(run) == [bucket in touched for bucket in range(BUCKETS)]
    assert _curated_ids(corpus) == sorted(texts.keys() - gone)
    status = 1 if sharing else 0
    proof = said(capsys, *_command(run, path, "--verify"), status=status)
    assert proof["remaining"] == []
    assert {row["ingest_id"]: row["grams"] for row in proof["shared"]} == sharing
    allowed = said(capsys, *_command(run, path, "--verify", "--allow-shared"))
    assert allowed["holds"]
    assert allowed["tokens"] == sum(len(texts[name]) + 1 for name in texts.keys() - gone)
    raw = said(capsys, *_command(run, path, "--verify", "--allow-shared", "--raw"), status=1)
    assert {row["ingest_id"] for row in raw["remaining"]} == gone
    assert {row["tree"] for row in raw["remaining"]} == {"data"}


def test_the_report_names_documents_readings_and_states_and_writes_nothing(
    made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, texts = made
    names = ["doc-0003", "doc-0010", "doc-0100"]
    path = _list(corpus, *(f"id:{name}" for name in names), "id:nowhere")
    plan = load_plan(run.tree.plan)
    state = corpus.root.parent / "state.json"
    with DeterministicLoader(plan, backend="numpy") as loader:
        for _ in range(12):
            next(loader)
        state.write_text(json.dumps(loader.state_dict()))
    before = contents(corpus.root.parent)
    facts = said(capsys, *_command(run, path, "--state", state))
    assert main(_command(run, path)) == 0
    assert contents(corpus.root.parent) == before
    gone = _copies(texts, names)
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
    found = readings_of(stream, plan.seq_len, places)
    assert found
    for place in places:
        held = list(readings(stream, [place]))
        expected = Readings(held[0], held[-1], len(held)) if held else None
        assert found.get(place) == expected


def test_later_shards_are_named_where_windows_are_filled(
    made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, _, texts = made
    run = _run(corpus, order="window_fill")
    _curate(run)
    name = next(
        name
        for name, tokens in texts.items()
        if bucket_of(name, BUCKETS) == 1 and _copies(texts, [name]) == {name} and len(tokens) % 32
    )
    path = _list(corpus, f"sha256:{_digest(texts[name])}")
    again = said(capsys, *_command(run, path, "--apply"))["rebuild"]
    assert again["curate"] == ["web/train/shard_0001"]
    assert again["later"] == ["web/train/shard_0002", "web/train/shard_0003"]
    curated = plan_run(run, run_sources(run)).curated["web"]
    assert curated["shard_0001"] == "input the takedown record"
    assert _curate(run) == [False, True, True, True]
    assert _curate(run) == [False] * BUCKETS


@pytest.mark.parametrize("url", ["", "s3://me:secret@bucket/corpus"])
def test_every_step_says_that_stores_and_exports_are_not_covered_and_what_to_do(
    made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str], url: str
) -> None:
    corpus, run, _ = made
    run.path.write_text(f'{run.path.read_text()}\n[publish]\nurl = "{url}"\n')
    path = _list(corpus, "id:doc-0001")
    store = "s3://[hidden]@bucket/corpus" if url else None
    named = f"nmoe publish {run.tree.plan} {store}" if store else "nmoe export, nmoe publish"
    for flags in ([], ["--apply"], ["--verify"]):
        main(_command(run, path, *flags))
        (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("not covered")]
        assert line.endswith(named)
        facts = said(capsys, *_command(run, path, *flags), status=int("--verify" in flags))
        assert facts["published"] == store
        assert ", ".join(facts["not_covered"]) in line
        for place in ("exports", "input files", "labels", "loader caches", "pictures", "event log"):
            assert place in line
        assert str(run.tree.seen) in line
        assert ("data shards and their kept versions" in line) == ("--verify" in flags)


def _label(run: Run, name: str, corpus: Corpus, texts: Texts, *, is_cut: bool) -> list[Path]:
    """Labels of a document as the oracle's, merged and kept ones: its hash is of the text that the
    oracle was shown, which may be the beginning alone."""
    shard = corpus.shard(bucket_of(name, BUCKETS))
    number = corpus.ingest_ids(shard.bucket).index(name)
    record = {"doc_id": corpus.doc_ids(shard.bucket)[number], "source": "web", "ok": True}
    record |= {"snippet": "its text", "text_sha256": "f" * 64 if is_cut else _digest(texts[name])}
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
    gone = _copies(texts, ["doc-0001"])
    files = _label(run, "doc-0001", corpus, texts, is_cut=is_cut)
    expected = {path.relative_to(run.tree.labels).as_posix(): 1 for path in files}
    path = _list(corpus, "id:doc-0001")
    assert said(capsys, *_command(run, path))["labels"] == expected
    said(capsys, *_command(run, path, "--apply"))
    _curate(run)
    less = _write(tmp_path / "less", {name: texts[name] for name in texts.keys() - gone})
    corpus.data.rename(tmp_path / "before")
    less.data.rename(corpus.data)
    by_hash = _list(corpus, f"sha256:{_digest(texts['doc-0001'])}")
    for flags in (["--verify", "--allow-shared"], []):
        facts = said(capsys, *_command(run, by_hash, *flags))
        assert facts["labels"] == expected
        assert main(_command(run, by_hash, *flags)) == 0
        line = f"labels: {len(files)} records hold the beginning of a text, in "
        assert line in capsys.readouterr().out
    assert facts["labelled"] == 1
    assert facts["documents"] == []
    assert read_summary(run.tree.takedown_proof)["labels"] == expected
    others = said(capsys, *_command(run, _list(corpus, "id:doc-0100")))
    assert others["labels"] == {}


def test_the_sentence_of_a_proof_is_as_narrow_as_its_scan_and_the_proof_says_what_was_looked_at(
    made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, texts = made
    # One whose passage others share, and one whose text is its own.
    of = {bool(_sharing(texts, _copies(texts, [n]))): n for n in texts if len(texts[n]) > GRAM}
    path = Path()
    for shares, name in sorted(of.items()):
        path = _list(corpus, f"id:{name}")
        said(capsys, *_command(run, path, "--apply"))
        _curate(run)
        assert main(_command(run, path, "--verify", "--allow-shared")) == 0
        out = capsys.readouterr().out
        assert "nothing is left" not in out
        assert ("no 50-gram of these texts is left in curated shards: " in out) == (not shares)
        said_of_shared = "texts is left in curated shards; {} others share passages"
        number = len(_sharing(texts, {n for m in of.values() for n in _copies(texts, [m])}))
        assert (said_of_shared.format(f"{number:,}") in out) == shares
    sealed = read_summary(run.tree.takedown_proof)
    assert sealed["roots"] == [str(run.tree.curated)]
    assert f"data shards and their kept versions ({run.tree.data})" in sealed["not_covered"]
    said(capsys, *_command(run, path, "--verify", "--allow-shared", "--raw"), status=1)
    sealed = read_summary(run.tree.takedown_proof)
    assert sealed["roots"] == [str(run.tree.curated), str(run.tree.data)]
    assert not [place for place in sealed["not_covered"] if "data shards" in place]


def test_a_reason_says_takedown_and_curated_shards_verify(
    made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, texts = made
    assert record_digest(run.tree, "web") is None
    said(capsys, *_command(run, _list(corpus, "id:doc-0001"), "--apply"))
    assert record_digest(run.tree, "web") is not None
    assert record_digest(run.tree, "books") is None
    _curate(run)
    bucket = bucket_of("doc-0001", BUCKETS)
    number = corpus.ingest_ids(bucket).index("doc-0001")
    assert left_out(run, ["web"]) == {"takedown": {"web": len(_copies(texts, ["doc-0001"]))}}
    assert why_left_out(run, corpus.shard(bucket), [number]) == {number: "takedown"}
    others = texts.keys() - _copies(texts, ["doc-0001"])
    assert corpus.verify(bucket) == sum(bucket_of(name, BUCKETS) == bucket for name in others)
    explained = said(capsys, "explain", corpus.doc_ids(bucket)[number], "--config", run.path)
    assert explained["curated"] == {"is_included": False}


def test_a_copy_that_comes_later_is_left_out_too(
    made: tuple[Corpus, Run, Texts], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, texts = made
    said(capsys, *_command(run, _list(corpus, "id:doc-0001"), "--apply"))
    grown = _write(tmp_path / "grown", texts | {"new": texts["doc-0001"], "own": np.arange(80)})
    run = _run(grown)
    grown.fit()
    for bucket in range(BUCKETS):
        grown.assign(bucket)
        grown.grade(bucket, lambda i: "keep")
    (grown.root / "takedown").mkdir()
    for name in ("documents.jsonl", "grams.npy"):
        (grown.root / "takedown" / name).write_bytes((corpus.root / "takedown" / name).read_bytes())
    _curate(run)
    assert {"new", "doc-0001"}.isdisjoint(_curated_ids(grown))
    assert "own" in _curated_ids(grown)
    path = _list(grown, "id:new")
    assert said(capsys, *_command(run, path, "--verify", "--allow-shared"))["remaining"] == []


def test_a_document_that_curated_shards_alone_still_hold_is_found(
    made: tuple[Corpus, Run, Texts], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, texts = made
    gone = _copies(texts, ["doc-0001"])
    less = _write(tmp_path / "less", {name: texts[name] for name in texts.keys() - gone})
    corpus.data.rename(tmp_path / "before")
    less.data.rename(corpus.data)
    facts = said(capsys, *_command(run, _list(corpus, "id:doc-0001")))
    found = {(row["tree"], row["ingest_id"]) for row in facts["documents"]}
    assert found == {("curated", name) for name in gone}
    assert facts["rebuild"]["curate"]


@pytest.mark.parametrize("step", [1, 2])
def test_a_kill_between_the_files_of_a_record_leaves_it_as_it_was(
    step: int, made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, texts = made
    said(capsys, *_command(run, _list(corpus, "id:doc-0001"), "--apply"))
    _curate(run)
    before = (corpus.root / "takedown" / "documents.jsonl").read_bytes()
    path = _list(corpus, "id:doc-0002", "id:doc-0003")
    with failing(f"rename:{step}:EIO"):
        assert main(_command(run, path, "--apply")) == 1
    assert (corpus.root / "takedown" / "documents.jsonl").read_bytes() == before
    assert _curate(run) == [False] * BUCKETS
    assert "not recorded" in refused_line(capsys, *_command(run, path, "--verify"))
    path = _list(corpus, "id:doc-0004")
    count = len(_copies(texts, ["doc-0004"]))
    assert said(capsys, *_command(run, path, "--apply"))["added"] == count
    assert said(capsys, *_command(run, path, "--apply"))["added"] == 0
    _curate(run)
    assert said(capsys, *_command(run, path, "--verify", "--allow-shared"))["texts"] == 2


def test_a_kill_between_record_and_rebuild_is_told_and_the_rebuild_goes_on(
    made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, texts = made
    names = ["doc-0001", "doc-0002", "doc-0003", "doc-0005"]
    path = _list(corpus, *(f"id:{name}" for name in names))
    said(capsys, *_command(run, path, "--apply"))
    touched = {bucket_of(name, BUCKETS) for name in _copies(texts, names)}
    assert len(touched) > 1
    with failing("rename:4:EIO"), pytest.raises(OSError, match="Input/output"):
        _curate(run)
    line = refused_line(capsys, *_command(run, path, "--verify"), code="E-TAKEDOWN-LEFT")
    assert "documents that remain" in line
    _curate(run)
    assert said(capsys, *_command(run, path, "--verify", "--allow-shared"))["holds"]


def test_a_proof_is_sealed_and_a_file_that_no_manifest_names_fails_it(
    made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, _ = made
    path = _list(corpus, "id:doc-0001")
    assert "apply" in refused_line(capsys, *_command(run, path, "--verify"))
    said(capsys, *_command(run, path, "--apply"))
    _curate(run)
    flags = "--verify", "--allow-shared"
    said(capsys, *_command(run, path, *flags))
    proof = read_summary(corpus.root / "takedown" / "proof.json")
    digests = {k: v for part in proof["scanned"] for k, v in part["files"].items()}
    files = {f.relative_to(corpus.curated).as_posix(): f for f in corpus.curated.rglob("*.npy")}
    assert digests == {k: hashlib.sha256(f.read_bytes()).hexdigest() for k, f in files.items()}
    assert proof["holds"]
    old = corpus.curated / "web" / "train" / ".shard_0000.tmp.old"
    old.mkdir()
    (old / "a.npy").write_bytes(b"")
    line = refused_line(capsys, *_command(run, path, *flags), code="E-TAKEDOWN-LEFT")
    assert "1 files that no manifest names" in line
    assert not read_summary(corpus.root / "takedown" / "proof.json")["holds"]
    (old / "a.npy").unlink()
    file = next(iter(files.values()))
    raw = bytearray(file.read_bytes())
    raw[140] ^= 1
    file.write_bytes(raw)
    refused_line(capsys, *_command(run, path, *flags), code="E-SHARD-CHECKSUM")


def test_a_proof_is_of_the_record_whose_texts_were_searched(
    made: tuple[Corpus, Run, Texts],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corpus, run, _ = made
    path, record = _list(corpus, "id:doc-0001"), corpus.tree.takedown
    said(capsys, *_command(run, path, "--apply"))
    _curate(run)
    before, below = record.read_bytes(), proof.shards_below

    def meanwhile(root: Path, **options: bool) -> Iterator[Any]:
        more = path.with_name("more.txt")
        more.write_text("id:doc-0005\n")
        assert main(_command(run, more, "--apply")) == 0
        return below(root, **options)

    monkeypatch.setattr(proof, "shards_below", meanwhile)
    assert main(_command(run, path, "--verify", "--allow-shared")) == 0
    made_of = read_summary(corpus.root / "takedown" / "proof.json")["record"]
    assert record.read_bytes() != before
    assert made_of == hashlib.sha256(before).hexdigest()


def test_a_proof_follows_links_to_the_directories_of_sources(
    made: tuple[Corpus, Run, Texts], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, texts = made
    path = _list(corpus, "id:doc-0001")
    said(capsys, *_command(run, path, "--apply"))
    moved = (corpus.curated / "web").rename(tmp_path / "elsewhere")
    (corpus.curated / "web").symlink_to(moved)
    failed = said(capsys, *_command(run, path, "--verify"), status=1)
    gone = _copies(texts, ["doc-0001"])
    assert {row["ingest_id"] for row in failed["remaining"]} == gone
    assert failed["unnamed"] == []


def test_the_proof_scans_kept_versions_and_the_report_leaves_them_out(
    made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, _ = made
    path, train = _list(corpus, "id:doc-0001"), corpus.curated / "web" / "train"
    name = f"shard_{bucket_of('doc-0001', BUCKETS):04d}"
    shutil.copytree(train / name, train / ".versions" / "one" / name)
    documents = said(capsys, *_command(run, path))["documents"]
    assert not [row for row in documents if ".versions" in row["doc_id"]]
    said(capsys, *_command(run, path, "--apply"))
    _curate(run)
    failed = said(capsys, *_command(run, path, "--verify", "--allow-shared"), status=1)
    assert failed["remaining"]
    assert all(".versions" in row["doc_id"] for row in failed["remaining"])


def test_nothing_is_proved_of_no_shards_or_of_a_list_that_is_not_recorded(
    made: tuple[Corpus, Run, Texts], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, _ = made
    said(capsys, *_command(run, _list(corpus, "id:doc-0001"), "--apply"))
    _curate(run)
    path = _list(corpus, "id:doc-0001", "id:doc-0002")
    said(capsys, *_command(run, path, "--verify", "--allow-shared"), status=1)
    proof = read_summary(corpus.root / "takedown" / "proof.json")
    assert (proof["holds"], proof["remaining"], len(proof["unrecorded"])) == (False, [], 2)
    corpus.curated.rename(tmp_path / "elsewhere")
    assert "no shard" in refused_line(capsys, *_command(run, path, "--verify"))


def test_a_flag_of_another_step_is_refused(
    made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, _ = made
    path, plan = _list(corpus, "id:doc-0001"), run.tree.plan
    for flags, where in (
        (["--raw"], "with --verify"),
        (["--verify", "--by", "me"], "with --apply"),
        (["-o", plan], "with --mask"),
        (["--apply", "--plan", plan], "without --apply"),
    ):
        assert where in refused_line(capsys, *_command(run, path, *flags))
    assert not run.tree.takedown.exists()


@pytest.mark.parametrize("name", ["documents.jsonl", "grams.npy"])
def test_a_damaged_record_is_refused(
    name: str, made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, _ = made
    path = _list(corpus, "id:doc-0001")
    said(capsys, *_command(run, path, "--apply"))
    file = corpus.root / "takedown" / name
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    refused_line(capsys, *_command(run, path, "--verify"), code="E-TAKEDOWN-RECORD")
    if name == "grams.npy":
        for others in (np.zeros(3, GRAMS), np.zeros((1, 3), GRAMS), np.zeros(3)):
            np.save(file, others)
            refused_line(capsys, *_command(run, path, "--verify"), code="E-TAKEDOWN-RECORD")


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[1:],
        lambda rows: [rows[0].replace(b'"text_sha256": "', b'"text_sha256": "0'), *rows[1:]],
        lambda rows: [rows[0].replace(b'"why": "', b'"why": "\\ud800'), *rows[1:]],
        lambda rows: rows[:-1],
    ],
)
def test_a_record_that_lost_or_changed_a_row_lets_no_document_come_back(
    change: Any, made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, _ = made
    said(capsys, *_command(run, _list(corpus, "id:doc-0001"), "--apply"))
    file = run.tree.takedown
    file.write_bytes(b"".join(change(file.read_bytes().splitlines(keepends=True))))
    with refused("E-TAKEDOWN-RECORD", "checksum"):
        _curate(run)


def test_grams_of_another_tokenizer_prove_nothing(
    made: tuple[Corpus, Run, Texts],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    corpus, run, _ = made
    path = _list(corpus, "id:doc-0001")
    found = report.add_rows
    with monkeypatch.context() as patch:
        others = lambda tree, rows, tokens: found(  # noqa: E731
            tree, [dict(row) | {"tokenizer": "another"} for row in rows], tokens
        )
        patch.setattr(report, "add_rows", others)
        said(capsys, *_command(run, path, "--apply"))
    _curate(run)
    line = refused_line(capsys, *_command(run, path, "--verify"), code="E-TAKEDOWN-TOKENIZER")
    assert "another" in line


def test_consumed_documents_stay_where_they_are_and_the_proof_says_so(
    made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, _ = made
    first = corpus.ingest_ids(0, corpus.curated)[0]
    text = run.path.read_text() + "\n[curation.resume_from_token]\nweb = 40\n"
    run.path.write_text(text.replace('order = "golden"', 'order = "golden"\nstability = "resume"'))
    run = Run(run.path)
    path = _list(corpus, f"id:{first}")
    said(capsys, *_command(run, path, "--apply"))
    curate.curate_shards(run, "web", range(BUCKETS), picture=False)
    failed = said(capsys, *_command(run, path, "--verify", "--allow-shared"), status=1)
    assert first in {row["ingest_id"] for row in failed["remaining"]}


def test_a_masked_plan_puts_eos_in_the_place_of_documents_and_takes_states_of_the_old(
    made: tuple[Corpus, Run, Texts], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, texts = made
    plan, out = run.tree.plan, tmp_path / "masked.json"
    path = _list(corpus, "id:doc-0100")
    facts = said(capsys, *_command(run, path, "--mask", plan, "-o", out))
    assert facts["masked"] == len(_copies(texts, ["doc-0100"]))
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
    assert "-o PLAN" in refused_line(capsys, *_command(run, path, "--mask", plan))
    path, out = _list(corpus, "id:nowhere"), tmp_path / "none.json"
    refused_line(capsys, *_command(run, path, "--mask", plan, "-o", out))
    assert not out.exists()
