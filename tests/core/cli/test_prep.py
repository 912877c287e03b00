"""`nmoe prep` and `prep-mixture`: every flag does what it says, and bad input writes nothing."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loader.files.format import load_manifest
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.prep.estimate import plan_split
from nmoe_core.prep.mixture import run_sources
from nmoe_core.shards.documents import ingest_ids
from tests.project import (
    Source,
    contents,
    in_foreground,
    json_lines,
    jsonl_source,
    said,
    write_project,
)
from tests.refusals import refused_line

ROWS = [{"key": f"k{i}", "text": f"row {i} " + "some words " * (i % 9 + 6)} for i in range(400)]
NAMED = ("prep", "--source", "jsonl", "--name", "web")
PREP = (*NAMED, "--paths", "in/notes.jsonl")
MIX = ("prep-mixture", "--config", "run.toml")


def _sources(**web: Any) -> list[Source]:
    table = {"id": "web", "tokens_b": 7e-6, "kind": "parquet", "paths": ["in/{a,b}.parquet"]}
    table |= {"id_field": "key", "split": "train[5%:]", "valid_split": "train[:10%]"}
    return [Source(table | web, {}), jsonl_source("notes", ROWS, tokens_b=3e-6)]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mixture of a Parquet and a JSONL source, with the working directory there."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    write_project(tmp_path, _sources(), {"prep": {"max_tokens": "flow"}})
    table = pa.Table.from_pylist(ROWS)
    for name, part in (("a", table[:250]), ("b", table[250:])):
        pq.write_table(part, tmp_path / "in" / f"{name}.parquet", row_group_size=64)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _prep(*flags: str, kind: str = "jsonl", paths: str = "notes.jsonl", out: str = "w") -> int:
    where = ("--source", kind, "--paths", paths if "/" in paths else f"in/{paths}")
    command = ("prep", "--name", "web", *where, "--output", f"out/{out}", "--num-shards", "2")
    return main([*command, *flags])


def _ids(manifest: str) -> set[str]:
    return {ingest_id for ingest_id, _ in ingest_ids(load_manifest(manifest))}


def _bytes(directory: str) -> dict[str, bytes]:
    return contents(Path(directory), "*.npy")


@pytest.mark.parametrize("allow_overlap", [False, True])
def test_a_slice_of_train_is_left_out_of_training_unless_the_mixture_allows_it(
    project: Path, capsys: pytest.CaptureFixture[str], allow_overlap: bool
) -> None:
    write_project(project, _sources(allow_overlap=allow_overlap))
    assert main([*MIX, "--max-tokens", "1M"]) == 0
    assert "sources without a validation split: notes" in capsys.readouterr().out
    train, valid = (_ids(f"out/data/web/{split}/manifest.json") for split in ("train", "valid"))
    assert valid == {f"k{i}" for i in range(40)}
    assert train == {f"k{i}" for i in range(20 if allow_overlap else 40, 400)}


def test_max_tokens_is_that_of_a_source_and_the_total_of_a_mixture(project: Path) -> None:
    assert _prep("--max-tokens", "2.5K") == 0
    assert main([*MIX, "--max-tokens", "4K", "--splits", "train"]) == 0
    splits = {"out/w": 2500, "out/data/web/train": 2800, "out/data/notes/train": 1200}
    for split, tokens in splits.items():  # and less than a document more
        assert tokens <= load_manifest(f"{split}/manifest.json").total_tokens < tokens + 40
    assert not Path("out/data/web/valid").exists()


def test_a_source_of_weight_zero_is_not_read_and_one_that_is_has_a_document_at_least(
    project: Path,
) -> None:
    plans = [run_sources(Run("run.toml"), max_tokens=budget) for budget in ("all", 1)]
    assert [[plan.max_tokens for plan in one] for one in plans] == [[None, None], [1, 1]]
    run = write_project(project, _sources(tokens_b=0.0)).run
    assert [plan.name for plan in run_sources(run)] == ["notes"]


@pytest.mark.parametrize("flags", [[], ["--set=prep.max_doc_tokens=11"]])
def test_the_dry_run_estimates_what_then_comes_out_and_writes_nothing(
    project: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    before = sorted(project.rglob("*"))
    command = [*MIX, "--max-tokens", "100K", *flags]
    plan = said(capsys, *command, "--dry-run")
    assert main([*command, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "total: about" in shown
    assert "no file written" in shown
    assert sorted(project.rglob("*")) == before
    assert [(p["source"], p["split"], p["quota_tokens"]) for p in plan] == [
        ("web", "train", 70_000),
        ("web", "valid", None),
        ("notes", "train", 30_000),
    ]
    for planned, made in zip(plan, said(capsys, *command)):
        assert planned["estimated_tokens"] == pytest.approx(made["tokens"], rel=0.35)
        size = sum(p.stat().st_size for p in Path(made["manifest"]).parent.rglob("*.npy"))
        assert planned["estimated_disk_bytes"] == pytest.approx(size, rel=0.5)
        assert planned["estimated_seconds"] >= 0


@pytest.mark.parametrize(
    ("dataset", "reads", "tokens"),
    [
        ({"hf_dataset": "org/name"}, "org/name", 10_000),
        ({"hf_dataset": "a/b", "hf_subset": "c", "hf_revision": "v1"}, "a/b c @v1", 10_000),
        ({}, "nothing yet", None),
    ],
)
def test_a_dry_run_asks_no_hub_and_tells_time_and_disk_of_the_quota(
    tmp_path: Path, dataset: dict[str, Any], reads: str, tokens: int | None
) -> None:
    table = {"id": "web", "kind": "huggingface", "tokens_b": 1e-5, **dataset}
    run = write_project(tmp_path, [Source(table, {})], {"prep": {"max_tokens": "flow"}}).run
    plan = plan_split(run, run_sources(run)[0], "train")
    assert (plan.reads, plan.quota_tokens, plan.tokens) == (reads, 10_000, tokens)
    assert plan.disk_bytes == (tokens and 42_500)
    assert plan.seconds is None if tokens is None else 0 < (plan.seconds or 0) < 3600


def test_a_dry_run_of_a_single_record_expects_its_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = jsonl_source("web", [{"id": "a", "text": "some words of a text " * 40}])
    made = write_project(tmp_path, [source], {"prep": {"max_tokens": "all"}})
    command = ("prep-mixture", "--config", made.config)
    (planned,) = said(capsys, *command, "--dry-run")
    (done,) = said(capsys, *command)
    assert planned["estimated_tokens"] == done["tokens"]


def test_a_dry_run_of_text_files_of_very_different_sizes_expects_their_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sample of a megabyte holds only the long files, which come first."""
    files = {f"in/a{i:02}.txt": f"file {i} has words of its own " * 1600 for i in range(25)}
    files |= {f"in/b{i:03}.txt": f"a few words, and {i} " * 9 for i in range(400)}
    table = {"id": "web", "kind": "files", "paths": ["in/*.txt"], "tokens_b": 1e-5}
    made = write_project(tmp_path, [Source(table, files)], {"prep": {"max_tokens": "all"}})
    command = ("prep-mixture", "--config", made.config)
    (planned,) = said(capsys, *command, "--dry-run")
    (done,) = said(capsys, *command)
    assert planned["estimated_tokens"] == pytest.approx(done["tokens"], rel=0.2)


def test_a_dry_run_names_what_is_wrong_with_every_source(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "in" / "a.parquet").write_bytes(b"PAR1 nothing")
    (project / "in" / "notes.jsonl").unlink()
    assert main([*MIX, "--dry-run"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert [line.split("]")[0] for line in errors] == [
        "web/train: ERROR [E-SOURCE-TORN",
        "web/valid: ERROR [E-SOURCE-TORN",
        "notes/train: ERROR [E-SOURCE-NOTFOUND",
    ]
    assert not Path("out").exists()


def test_few_bad_records_are_left_out_and_named_and_many_fail_the_run(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(row).encode() for row in ROWS * 5]
    lines[700] = b'{"text": "torn'
    Path("in/notes.jsonl").write_bytes(b"\n".join(lines))
    assert _prep("--json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)[0]["bad_records"] == 1
    assert "in/notes.jsonl:701: " in shown.err
    flags = ("--output", "out/x")
    line = refused_line(capsys, *PREP, *flags, "--max-bad-share", "0", code="E-SOURCE-RECORD]")
    assert "in/notes.jsonl:701: " in line
    assert not Path("out/x").exists()
    assert _prep("--on-error", "skip", "--max-bad-share", "0", out="x") == 0


def test_force_makes_it_again_and_an_unhappy_one_leaves_the_old_output_readable(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _prep() == 0
    before = _bytes("out/w")
    Path("in/notes.jsonl").write_bytes(b"not JSON\n" * 50)
    flags = ("--output", "out/w", "--num-shards")
    refused_line(capsys, *PREP, *flags, "3", code="E-PREP-CHANGED]")
    refused_line(capsys, *PREP, *flags, "2", code="E-SOURCE-RECORD]")
    refused_line(capsys, *PREP, *flags, "2", "--force", code="E-SOURCE-RECORD]")
    assert _bytes("out/w") == before
    assert main(["verify", "out/w", "--checksums", "--deep"]) == 0
    Path("in/notes.jsonl").write_text(json_lines(ROWS[:100]))
    assert _prep("--force") == 0
    assert load_manifest("out/w/manifest.json").total_documents == 100
    assert main(["verify", "out/w", "--checksums", "--deep"]) == 0


_JSONL = ("--source", "jsonl", "--paths", "in/notes.jsonl")
BAD = {
    ("--source", "parquet", "--paths", "in/notes.jsonl"): "E-SOURCE-TORN",
    ("--source", "parquet", "--paths", "in/*.arrow"): "E-SOURCE-NOTFOUND",
    ("--source", "parquet", "--paths", "in/a.parquet", "--text-field", "body"): "E-SOURCE-FIELD",
    ("--source", "parquet", "--paths", "in/a.parquet", "--id-field", "uid"): "E-SOURCE-FIELD",
    ("--source", "arrow", "--paths", "in/a.parquet"): "E-SOURCE-TORN",
    ("--source", "arrow", "--paths", "in/empty"): "E-SOURCE-TORN",
    ("--source", "jsonl", "--paths", "in/a.parquet"): "E-SOURCE-RECORD",
    ("--source", "jsonl", "--paths", "in/empty"): "E-SOURCE-EMPTY",
    (*_JSONL, "--set=prep.min_doc_tokens=9999"): "E-SOURCE-EMPTY",
    (*_JSONL, "--text-field", "body"): "E-SOURCE-RECORD",
    (*_JSONL, "--split", "valid"): "E-SOURCE-SPLIT",
    (*_JSONL, "--split", "train[:1"): "E-CONFIG",
    (*_JSONL, "--split", "train[400:]"): "E-SOURCE-EMPTY",
    (*_JSONL, "--split", "train[20%:10%]"): "E-SOURCE-EMPTY",
    ("--source", "jsonl", "--paths", "http://127.0.0.1:9/x.jsonl"): "E-SOURCE-NETWORK",
    (*_JSONL, "--subset", "x"): "E-CONFIG",
    (*_JSONL, "--max-tokens", "1X"): "E-CONFIG",
    (*_JSONL, "--max-bad-share", "2"): "E-CONFIG",
    (*_JSONL, "--workers", "0"): "E-CONFIG",
    (*_JSONL, "--set=prep.version=../x"): "E-CONFIG",
    (*_JSONL, "--eos-token-id", "5"): "E-TOKENIZER-DRIFT",
    (*_JSONL, "--vocab-size", "50257"): "E-TOKENIZER-DRIFT",
    (*_JSONL, "--tokenizer", "gpt9"): "E-TOKENIZER",
    ("--source", "jsonl"): "E-CONFIG",
    ("--source", "jsonl", "--paths", "nosuch://a/b"): "E-SOURCE-PROTOCOL",
    ("--source", "hf"): "E-CONFIG",
    ("--source", "hf", "--dataset", "./nowhere"): "E-SOURCE-NOTFOUND",
    ("--source", "hf", "--dataset", "./in", "--paths", "in/notes.jsonl"): "E-CONFIG",
}


def test_a_source_without_a_document_is_told_whether_its_slice_or_its_records_are_why(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, why in (
        (("--split", "train[400:]"), "found 0 records"),
        (("--split", "train[1:3]", "--set=prep.min_doc_tokens=9999"), "found 2 records"),
        (("--set=prep.min_doc_tokens=9999",), "found 400 records"),
    ):
        line = refused_line(capsys, *PREP, *flags, "--output", "w", code="E-SOURCE-EMPTY")
        assert why in line
        assert ("the bounds of the slice" in line) == (why == "found 0 records")


@pytest.mark.parametrize(("flags", "code"), BAD.items(), ids=map(" ".join, BAD))
def test_bad_input_is_one_line_and_writes_nothing(
    project: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], code: str
) -> None:
    (project / "in" / "empty").write_bytes(b"")
    before = sorted(project.rglob("*"))
    refused_line(capsys, "prep", *flags, "--name", "web", "--output", "new/w", code=code)
    assert sorted(project.rglob("*")) == before


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--flow", "big"), "big"),
        (("--stage", "long"), "no such stage"),
        (("--splits", "train,test"), "'test'"),
        (("--max-tokens", "many"), "many"),
        (("--set=mixture_toml=nowhere.toml",), "nowhere.toml"),
        (("--set=flow_profiles_toml=nowhere.toml",), "nowhere.toml"),
        (("--set=mixture_toml=nowhere",), "one of demo, olmo3_1025"),
        (("--set=mixture_toml=olmo3_1025",), "olmo3_1025_pretrain_6T"),
        (("--set=flow_profiles_toml=flow_profiles",), "full_train"),
        (("--num-shards", "0"), "num_shards"),
        (("--vocab-size", "7"), "vocab_size"),
    ],
)
def test_a_flag_of_a_mixture_that_cannot_be_is_one_line_and_writes_nothing(
    project: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], says: str
) -> None:
    assert says in refused_line(capsys, *MIX, *flags)
    assert not Path("out").exists()


LONG = ("prep-mixture", "--config", "moonlet", "--flow", "full_train", "--stage", "long")
OWN = ("--set", "root=out", "--data-root", "out/data")


def test_the_sources_of_a_stage_that_say_nothing_to_read_are_named_in_one_line_with_their_file(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused_line(capsys, *LONG, *OWN, code="E-SOURCE-NONE")
    ids = [source.name for source in run_sources(Run("moonlet"), flow="full_train", stage="long")]
    assert len(ids) == 6
    assert ", ".join(ids) in line
    assert "olmo3_1025.toml" in line
    assert "--set mixture_toml=COPY" in line
    assert not Path("out").exists()


def test_a_copy_of_the_mixture_with_its_sources_named_makes_that_stage(project: Path) -> None:
    text = Run("moonlet").required("mixture_toml").read_text()
    start = text.index("[mixtures.olmo3_1025_longmino_50B]")
    named = 'percent = \\1\nkind = "jsonl"\npaths = ["in/notes.jsonl"]'
    text = text[:start] + re.sub(r"percent = ([0-9.]+)", named, text[start:])
    Path("own.toml").write_text(text)
    few = ("--max-tokens", "1K", "--num-shards", "1", "--workers", "1")
    few += ("--set=mixture_toml=own.toml",)
    assert main([*LONG, *OWN, *few]) == 0
    assert len(list(Path("out/data").glob("*/train/manifest.json"))) == 6


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("run.toml", "num_shards", "num_shard", "did you mean 'num_shards'"),
        ("run.toml", '"flow"', '"lots"', "lots"),
        ("run.toml", "mixture.toml", "mixtures.toml", "mixtures.toml"),
        ("run.toml", '"small"', '"smal"', "smal"),
        ("mixture.toml", "notes.jsonl", "*.rst", "in/*.rst"),
        ("mixture.toml", "paths", "path", "did you mean 'paths'"),
    ],
)
def test_a_wrong_word_in_a_file_of_a_mixture_is_one_line_and_nothing_is_written(
    project: Path, capsys: pytest.CaptureFixture[str], file: str, old: str, new: str, says: str
) -> None:
    path = project / file
    path.write_text(path.read_text().replace(old, new))
    code = "E-SOURCE-NOTFOUND" if "*" in new else "E-CONFIG"
    assert says in refused_line(capsys, *MIX, code=code)
    assert not Path("out").exists()


def test_flags_of_a_mixture_stand_in_for_the_configuration(project: Path) -> None:
    memos = jsonl_source("memos", [], tokens_b=3e-6, paths=["in/notes.jsonl"])
    write_project(project / "other", [_sources()[0], memos])
    flows = project / "other" / "flows.toml"
    tiny = flows.read_text().replace("flow.small", "flow.tiny").replace("1.0", "0.1")
    flows.write_text(tiny)
    command = [
        *MIX,
        "--set=mixture_toml=other/mixture.toml",
        "--set=flow_profiles_toml=other/flows.toml",
    ]
    command += ["--flow", "tiny", "--data-root", "d"]
    command += ["--num-shards", "3", "--workers", "1", "--splits", "train", "--stage", "pretrain"]
    command += ["--tokenizer", "o200k_harmony", "--vocab-size", "201088"]
    command += ["--set=prep.engine=reference"]
    assert main([*command, "--eos-token-id", "199999", "--parallel"]) == 0
    manifest = load_manifest("d/memos/train/manifest.json")
    assert 300 <= manifest.total_tokens < 340
    assert sorted(p.name for p in Path("d/web/train").glob("shard_*")) == [
        f"shard_{i:04d}" for i in range(3)
    ]
    assert not Path("out").exists()


def test_one_bad_source_of_a_mixture_does_not_stop_the_others_when_asked(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "in" / "b.parquet").write_bytes(b"PAR1")
    line = refused_line(capsys, *MIX)
    assert "in/b.parquet" in line
    assert not Path("out").exists()
    assert main([*MIX, "--continue-on-error"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in errors] == ["web/train", "web/valid"]
    assert main(["verify", "out/data/notes/train", "--deep"]) == 0


@pytest.fixture
def bucket(project: Path, s3: tuple[Any, Any]) -> Any:
    """The project's input in a bucket."""
    for path in (project / "in").iterdir():
        s3[0].put_file(str(path), f"corpus/in/{path.name}")
    return s3[0]


@pytest.mark.slow
def test_a_bucket_is_prepared_to_the_bytes_of_the_same_files_here(bucket: Any) -> None:
    flags = ("--id-field", "key")
    for kind, name in (("parquet", "*.parquet"), ("jsonl", "notes.jsonl")):
        assert _prep(*flags, kind=kind, paths=name, out=kind) == 0
        workers = (*flags, "--workers", "2")
        remote = f"s3://corpus/in/{name}"
        assert _prep(*workers, kind=kind, paths=remote, out=f"s3_{kind}") == 0
        assert _bytes(f"out/{kind}") == _bytes(f"out/s3_{kind}")
    assert _prep(*flags, kind="jsonl", paths=remote, out="s3_jsonl") == 0  # nothing to do
    bucket.pipe("corpus/in/notes.jsonl", b'{"key": "new", "text": "some other words"}\n' * 9)
    assert _prep(*flags, kind="jsonl", paths=remote, out="s3_jsonl") == 1


def test_what_is_left_out_and_cut_is_said_with_its_share(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": text} for text in ("x", "", *["a few words more than that " * 9] * 6)]
    (project / "in" / "mixed.jsonl").write_text(json_lines(rows))
    command = ["prep", "--source", "jsonl", "--paths", "in/mixed.jsonl", "--name", "web"]
    command += ["--num-shards", "2", "--output", "out/w", "--set=prep.max_doc_tokens=20"]
    (made,) = said(capsys, *command)
    assert (made["documents"], made["cut"], made["split_records"]) == (18, 0, 6)
    command += ["--set=prep.long_documents=cut", "--force"]
    (made,) = said(capsys, *command)
    shown = said(capsys, "info", "out/w/manifest.json")
    expected = {"left_out": 2, "left_out_share": 0.25, "cut": 6, "split_records": 0}
    assert made | expected == made
    assert shown | expected == shown


def test_a_wrong_field_or_slice_is_answered_with_what_there_is(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*PREP, "--output", "out/w"]
    line = refused_line(capsys, *command, "--text-field", "body")
    assert "field 'body' is missing among 'key', 'text'" in line
    assert "slice" in refused_line(capsys, *command, "--split", "train[20%:10%]")


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize(
    ("sent", "status", "line"),
    [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "terminated\n")],
)
def test_a_signal_while_modules_are_imported_is_one_line(
    project: Path, sent: signal.Signals, status: int, line: str
) -> None:
    (project / "numpy.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(60)")
    paths = os.pathsep.join([str(project), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    with subprocess.Popen(
        in_foreground("info", "out"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "importing\n"
        child.send_signal(sent)
        errors = child.communicate()[1]
    assert (child.returncode, errors) == (status, line)


def test_a_reader_that_has_enough_is_no_error(project: Path) -> None:
    assert _prep("--num-shards", "1") == 0
    command = [sys.executable, "-m", "nmoe_core", "info", "out/w/manifest.json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 128 + signal.SIGPIPE


def test_an_interrupted_command_exits_130(project: Path) -> None:
    code = (
        "import sys, nmoe_core.tasks.commands as p\n"
        "from nmoe_core.cli import main\n"
        "def stop(*a, **k): raise KeyboardInterrupt\n"
        "p.prep_shards = stop\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", code, *PREP, "--output", "out/w"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
