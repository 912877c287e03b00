"""`nmoe init`: what lies in a directory becomes one file that a run takes as it is."""

import gzip
import json
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from loader.config import read_config
from loader.errors import ConfigError
from nmoe_core.cli import main
from nmoe_core.cli.project.fields import with_text_field
from nmoe_core.cli.project.patterns import with_paths
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources
from nmoe_core.sources.discover import discover
from nmoe_core.sources.spec import SourceSpec
from nmoe_core.text.tokenizer import load_tokenizer
from tests.project import CONFIGS, contents
from tests.refusals import refused, refused_line

TEXTS = [f"Note {i}: this is a short note about rivers and hills. " * 9 for i in range(90)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, texts: list[str] = TEXTS, field: str = "text") -> None:
    """Records of a title and a text, in the format that the suffix names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"title": f"t{i}", field: text} for i, text in enumerate(texts)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return
    payload = "".join(json.dumps(row) + "\n" for row in rows).encode()
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(path.suffix)
    path.write_bytes(pack(payload) if pack else payload)


def test_a_directory_of_compressed_files_becomes_a_run_over_them(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here / "notes.jsonl.gz")
    write(here / "web" / "part-0.jsonl.zst", field="content")
    write(here / "books.parquet")
    (here / "broken.jsonl").write_text("not JSON\n")
    assert main(["init", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    found = {one["source"]: one for one in facts["sources"]}
    assert list(found) == ["books", "broken", "notes", "web"]
    assert {one["documents"] for one in found.values()} == {90, None}
    assert found["broken"]["problem"].startswith("ERROR [E-SOURCE-FIELD]")
    assert found["web"]["text_field"] == "content"
    tokens = len(load_tokenizer().encode_batch(TEXTS).ids) + len(TEXTS)
    assert found["notes"]["tokens"] == pytest.approx(tokens, rel=0.01)
    run = Run("nmoe.toml")
    plans = run_sources(run)
    assert [plan.name for plan in plans] == ["books", "notes", "web"]
    assert [plan.max_tokens for plan in plans] == [None] * 3
    # Of so few documents, copies are left out, and no process is started to make anything.
    assert run.config.curation.where == "is_survivor and decision in ('keep', 'band')"
    assert run.config.compute.workers == 1
    assert (run.base, run.tree.root) == (here, here / "out")
    assert read_config("nmoe.toml")["mixture_toml"] == here / "nmoe.toml"
    # Without --config, the project of the working directory is the run.
    assert main(["prep-mixture", "--dry-run", "--json"]) == 0
    assert {row["problem"] for row in json.loads(capsys.readouterr().out)} == {None}
    assert "E-CONFIG" in refused_line(capsys, "init")


GERMAN = [f"Notiz {i}: Dies ist eine kurze Notiz über Flüsse und Hügel. " * 9 for i in range(400)]


def test_documents_of_languages_that_the_stand_in_does_not_judge_are_kept_unjudged(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here / "notes.jsonl", TEXTS * 4)
    write(here / "recht.jsonl", GERMAN)
    assert main(["init"]) == 0
    assert "judges 360 of 760 documents" in capsys.readouterr().out
    rule = Run("nmoe.toml").config.curation.where
    assert rule == "is_survivor and (decision in ('keep', 'band') or lang not in ('en', 'und'))"


def test_of_a_corpus_that_the_stand_in_does_not_judge_init_names_no_grader(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here / "recht.jsonl", GERMAN)
    assert main(["init"]) == 0
    said = capsys.readouterr().out
    assert "judges 0 of 400 documents" in said
    assert "[oracle]" in said
    config = Run("nmoe.toml").config
    assert (config.grading.grader, config.curation.where) == ("none", "is_survivor")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["a-00001-of-2.jsonl", "a-00002-of-2.jsonl"], {"a": ["a-*.jsonl"]}),
        (["web/x.jsonl", "web/de/y.jsonl"], {"web": ["web/**/*.jsonl"]}),
        (["web/only.jsonl"], {"web": ["web/*.jsonl"]}),
        (["web/de/a1.jsonl", "web/de/a2.jsonl"], {"web": ["web/de/*.jsonl"]}),
        (["web/[x]/only.jsonl"], {"web": ["web/[x]/only.jsonl"]}),
        (["a1.jsonl", "a2.jsonl", "a3b.jsonl"], {"a": ["a[0-9]*.jsonl"], "a3b": None}),
        (["part-7.JSONL"], {"part": ["part-*.JSONL"]}),
        (["a b.csv", "a-b.csv", "a_b.csv"], {"a_b": None, "a_b_csv": None, "a_b_csv_2": None}),
        (["a.jsonl", "a.parquet"], {"a": ["a.jsonl"], "a_parquet": ["a.parquet"]}),
        (["a.jsonl", "readme.md", ".cache/b.jsonl", "out/c.jsonl"], {"a": ["a.jsonl"]}),
        (["env/pyvenv.cfg", "env/x.jsonl", "one.txt", "two.md"], {"one": None, "two": None}),
    ],
)
def test_files_of_one_directory_or_whose_names_differ_in_numbers_are_one_source(
    here: Path, files: list[str], expected: dict[str, list[str] | None]
) -> None:
    for name in files:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("{}\n")
    inputs = discover(".", here)
    found = {spec.id: with_paths(spec, inputs.files, here) for spec in inputs.specs}
    assert found.keys() == expected.keys()
    for name, paths in expected.items():
        assert paths is None or list(found[name].paths) == paths


def test_the_field_with_the_longest_texts_is_taken_where_none_has_a_usual_name(here: Path) -> None:
    write(here / "a.jsonl", field="passage")
    spec = SourceSpec(id="a", kind="jsonl", paths=("a.jsonl",))
    assert with_text_field(spec, here).text_field == "passage"


def test_a_file_a_url_or_a_hub_id_is_one_source(here: Path) -> None:
    write(here / "a.jsonl")
    assert [spec.paths for spec in discover("a.jsonl", here).specs] == [("a.jsonl",)]
    assert discover("s3://b/c/web.parquet", here).specs[0].kind == "parquet"
    (hub,) = discover("owner/some-name", here, "sub").specs
    assert (hub.id, hub.hf_dataset, hub.hf_subset) == ("some_name", "owner/some-name", "sub")
    (here / "a.bin").touch()
    with refused(
        "E-SOURCE-NOTFOUND",
        r"not a file that can be read as text.*\.jsonl, .*\.tex, also \.gz, \.zst",
    ):
        discover("a.bin", here)
    for missing in ("nowhere", "x/y/z.jsonl"):
        with refused("E-SOURCE-NOTFOUND"):
            discover(missing, here)


def test_without_text_or_a_project_a_command_is_refused_in_one_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused_line(capsys, "init", code="E-SOURCE-NOTFOUND")
    (here / "a.jsonl").write_text('{"n": 1}\n')
    refused_line(capsys, "init", code="E-SOURCE-FIELD")
    for verb in ("report", "run", "ui", "plan"):
        assert "nmoe init" in refused_line(capsys, verb, code="E-CONFIG-MISSING")
    assert not (here / "nmoe.toml").exists()


def test_a_port_that_is_taken_is_refused_before_anything_is_started(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("dagster")
    write(here / "a.jsonl")
    assert main(["init"]) == 0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "--port" in refused_line(capsys, "ui", "--port", str(port), code="E-CONFIG-PORT")
    assert not (here / ".dagster").exists()


def test_a_section_and_a_file_of_mixtures_are_refused_together(here: Path) -> None:
    text = 'root = "out"\nmixture_toml = "demo"\n[mixtures.own]\n'
    (here / "nmoe.toml").write_text(text)
    with pytest.raises(ConfigError, match="given twice"):
        Run("nmoe.toml")


def test_configs_copies_every_configuration_and_copies_again_what_is_missing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--configs", "own/configs"]) == 0
    own = here / "own" / "configs"
    shipped = contents(CONFIGS)
    assert capsys.readouterr().out == f"{len(shipped)} configurations are in {own}\n"
    assert contents(here) == {f"own/configs/{name}": payload for name, payload in shipped.items()}
    (own / "demo.toml").unlink()
    (own / "mine.toml").touch()
    assert main(["init", "--configs", "own/configs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"configs": str(own), "files": len(shipped)}
    assert contents(own) == shipped | {"mine.toml": b""}


def test_configs_copies_nothing_into_a_directory_that_holds_other_versions(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {"demo.toml": b"", "rubrics/quality_v1.toml": b"name = 5"}
    (here / "rubrics").mkdir()
    for name, payload in changed.items():
        (here / name).write_bytes(payload)
    line = refused_line(capsys, "init", "--configs", ".", code="E-CONFIG")
    assert all(name in line for name in changed)
    assert contents(here) == changed


@pytest.mark.parametrize("flag", [["--demo"], ["--configs", "own"]])
@pytest.mark.parametrize("more", [["corpus"], ["--subset", "en"]])
def test_a_flag_of_init_that_reads_no_documents_is_refused_with_a_source(
    here: Path, capsys: pytest.CaptureFixture[str], flag: list[str], more: list[str]
) -> None:
    line = refused_line(capsys, "init", *flag, *more, code="E-CONFIG")
    assert "neither SOURCE nor --subset" in line
    assert contents(here) == {}
