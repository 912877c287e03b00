"""`nmoe init` over what directories really hold: every file is accounted for, none ends it."""

import bz2
import gzip
import importlib
import json
import lzma
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.feather as pa_feather
import pyarrow.parquet as pq
import pytest
import zstandard

from nmoe_core.base.strict import validate
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources
from nmoe_core.sources.open import open_source
from nmoe_core.sources.records import WARC_FIELDS, BadRecord
from nmoe_core.sources.spec import SourceSpec
from tests.core.sources.archives import archive, conversion, page, response, text_of
from tests.refusals import refused_line

TEXTS = [f"Note {i}: a short note about rivers, größere Hügel and “hills”. " * 5 for i in range(40)]
ROWS = [{"id": f"n{i}", "kind": "note", "body": text} for i, text in enumerate(TEXTS)]
COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    return project


def put(path: Path, payload: bytes | str = LINES) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(payload.encode() if isinstance(payload, str) else payload)
    return path


def init(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    """The facts of the command, whose totals add up to the files of the ledger."""
    capsys.readouterr()
    assert main(["init", "--json", *flags]) == 0
    facts = json.loads(capsys.readouterr().out)
    ledger = json.loads(Path(facts["ledger"]).read_bytes())
    names = ("taken", "held_out", "left_out")
    for key in ("files", "size_bytes"):
        assert facts["seen"][key] == sum(facts[name][key] for name in names)
    assert facts["seen"]["files"] == len(ledger["files"])
    assert facts["seen"]["size_bytes"] == sum(row["size_bytes"] for row in ledger["files"])
    facts["rows"] = {row["path"]: row for row in ledger["files"]}
    for row in facts["rows"].values():
        assert (row["reason"] is None) == (row["use"] == "train")
    return facts


def read(split: str = "train") -> dict[str, list[str]]:
    """The texts that a run of the project reads, by source."""
    run, found = Run("nmoe.toml"), {}
    for plan in run_sources(run):
        if split == "train" or plan.has_valid:
            opened = open_source(plan.spec, run.base, split)
            records = [r for block in opened.source.blocks() for r in block.records()]
            found[plan.name] = [r.text for r in records if not isinstance(r, BadRecord)]
    return found


def arrow(write: Callable[..., Any]) -> bytes:
    sink = pa.BufferOutputStream()
    write(pa.table(COLUMNS), sink)
    return sink.getvalue().to_pybytes()


def ipc(table: pa.Table, sink: Any) -> None:
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


CSV = arrow(pa_csv.write_csv)
FORMS: dict[str, bytes] = {
    "a.jsonl": LINES.encode(),
    "a.JSONL": LINES.encode(),
    "a.ndjson": LINES.encode("utf-8-sig"),
    "utf16.jsonl": LINES.encode("utf-16"),
    "lines.json": LINES.encode(),
    "array.json": json.dumps(ROWS, indent=2).encode(),
    "array.jsonl": json.dumps(ROWS, ensure_ascii=False).encode("utf-8-sig"),
    "array16.json": json.dumps(ROWS).encode("utf-16"),
    "a.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "a.jsonl.bz2": bz2.compress(LINES.encode()),
    "a.jsonl.xz": lzma.compress(LINES.encode()),
    "a.jsonl.zstd": zstandard.compress(LINES.encode()),
    "a.parquet": arrow(pq.write_table),
    "a.PARQUET": arrow(pq.write_table),
    "a.arrow": arrow(ipc),
    "a.feather": arrow(pa_feather.write_feather),
    "a.csv": CSV,
    "a.Csv.GZ": gzip.compress(CSV),
    "utf16.csv": CSV.decode().encode("utf-16"),
    "a.tsv": CSV.replace(b'","', b'"\t"'),
    "semicolon.csv": CSV.replace(b'","', b'";"'),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_records_is_read_and_its_text_is_found(
    here: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    put(here / name, FORMS[name])
    (source,) = init(capsys)["sources"]
    assert (source["text_field"], source["documents"], source["unreadable"]) == ("body", 40, 0)
    assert list(read().values()) == [TEXTS]


def test_every_kind_of_file_in_a_directory_becomes_a_source_of_its_kind(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(here / "crawl-0.warc.gz", archive([response(f"http://a/{i}", page(i)) for i in range(5)]))
    os.rename(here / "crawl-0.warc.gz", here / "crawl-0.warc")
    put(here / "texts.warc.wet.gz", gzip.compress(archive([conversion("http://a/", b"a text")])))
    put(here / "pages" / "a.html", page(1))
    put(here / "pages" / "b.HTM.xz", lzma.compress(page(2)))
    put(here / "pages" / "old.html", "<p>ein Café über dem Fluß</p>".encode("cp1252"))
    put(here / "semicolon-1.csv", "title;body\n" + "".join(f"t;{text}\n" for text in TEXTS))
    put(here / "semicolon-2.csv", CSV)
    chat = {"messages": [{"role": "user", "content": "What is a delta?"}]}
    put(here / "chat.jsonl", json.dumps(chat) + "\n")
    put(here / "other.jsonl", json.dumps({"conversations": [{"from": "human", "value": "a"}]}))
    put(here / "torn.warc", archive([response("http://a/", page(1))])[:-9])
    facts = init(capsys)
    kinds = {one["source"]: one["kind"] for one in facts["sources"] if one["problem"] is None}
    assert kinds == {
        "chat": "jsonl",
        "crawl": "warc",
        "semicolon": "csv",
        "semicolon_csv": "csv",
        "texts_warc": "wet",
        "pages": "html",
    }
    found = read()
    assert found["crawl"] == [text_of(i) for i in range(5)]
    assert found["pages"] == [text_of(1), text_of(2)]
    assert found["texts_warc"] == ["a text"]
    assert found["chat"] == ["<|im_start|>user\nWhat is a delta?<|im_end|>\n"]
    assert found["semicolon"] == found["semicolon_csv"] == TEXTS
    specs = {plan.name: plan.spec for plan in run_sources(Run("nmoe.toml"))}
    assert specs["semicolon"].csv_delimiter == ";"
    assert specs["semicolon_csv"].csv_delimiter is None
    assert specs["crawl"].columns == WARC_FIELDS
    assert specs["chat"].chat_template == "chatml"
    said = {name: row["reason"] for name, row in facts["rows"].items() if row["reason"]}
    assert "Windows-1252" in said["pages/old.html"]
    assert "message 1 has no role" in said["other.jsonl"]
    assert "damaged web archive" in said["torn.warc"]
    assert facts["sources"][1]["skipped"] == {"warcinfo records": 1}


def test_quoted_line_ends_are_text_and_odd_rows_of_a_table_are_bad_records(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ['text,n\n"two\nlines, ""quoted""",1\n', "one field\n", "\n", "caf\xe9 au lait,2\n"]
    put(here / "a.csv", "".join(rows).encode("latin-1") + b"a last row,3\n")
    (source,) = init(capsys)["sources"]
    assert (source["documents"], source["unreadable"]) == (2, 2)
    assert read() == {"a": ['two\nlines, "quoted"', "a last row"]}
    assert run_sources(Run("nmoe.toml"))[0].spec.on_error == "skip"


def test_an_array_is_one_record_an_item_wherever_the_reading_starts(here: Path) -> None:
    items = [{"text": "a" * n, "big": 2**70, "odd": "\ud800"} for n in range(300)]
    put(here / "a.json", json.dumps([*items, 7, "x"], indent=1))
    spec = validate(SourceSpec, {"id": "a", "kind": "jsonl", "paths": ["a.json"]}, "test")
    source = open_source(spec, here, "train").source
    records = [record for block in source.blocks() for record in block.records()]
    assert [r.text for r in records[:300] if not isinstance(r, BadRecord)] == [
        item["text"] for item in items
    ]
    said = "a.json:{}: not a JSON object but {}"
    assert [str(r) for r in records[300:]] == [
        f"{here}/{said.format(301, 'int')}",
        f"{here}/{said.format(302, 'str')}",
    ]
    assert source.num_rows() == 302


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (LINES.encode("cp1252"), "Windows-1252"),
        (LINES.encode("utf-16-le"), "UTF-16"),
        (b'{"name": "x", "version": "1.0"}', "one JSON object"),
        (json.dumps({"description": TEXTS[0], "name": "x"}, indent=2).encode(), "one JSON object"),
        (b'{"messages": [{"role": "user"}], "meta": {"set": "A b"}}\n' * 2, "message 1"),
        (b'{"n": 1, "url": "http://a.example/b"}\n' * 3, "no text field; found n, url"),
        (b"", "empty"),
        (b"\n\n", "no records"),
        (b'[{"text": "cut', "not JSON"),
    ],
)
def test_a_file_without_text_is_left_out_and_the_reason_says_why(
    here: Path, capsys: pytest.CaptureFixture[str], payload: bytes, said: str
) -> None:
    put(here / "odd.json", payload)
    assert said in refused_line(capsys, "init")
    put(here / "good.jsonl")
    facts = init(capsys)
    assert said in facts["rows"]["odd.json"]["reason"]
    assert facts["rows"]["odd.json"]["use"] == "left out"
    assert read() == {"good": TEXTS}
    assert main(["prep-mixture", "--dry-run"]) == 0


def test_each_kind_of_file_is_taken_or_left_out_with_its_reason(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(here / "data" / "a.jsonl")
    put(here / "data" / "b.csv", CSV)
    put(here / "data" / "README.md", "# about the data")
    put(here / "data" / "torn.parquet", FORMS["a.parquet"][:900])
    put(here / "data" / "none.parquet", b"")
    put(here / "texts" / "deep" / "one.txt", TEXTS[0])
    put(here / "texts" / "two.TXT", TEXTS[1])
    put(here / "texts" / "wide.txt", TEXTS[2].encode("utf-16"))
    put(here / "texts" / "bad.txt", TEXTS[3].encode("cp1252"))
    put(here / "texts" / os.fsdecode(b"\xff.txt"), TEXTS[4])
    put(here / os.fsdecode(b"\xfe.txt"), TEXTS[5])
    put(here / "page.docx", "<p>")
    put(here / "all.tar.gz", b"x")
    put(here / "notes", "x")
    put(here / "package.json", '{"description": "some words about a package"}')
    put(here / ".git" / "objects" / "a.jsonl")
    put(here / ".hidden.txt", "x")
    put(here / "node_modules" / "x" / "readme.md", "x")
    put(here / "pic.png", b"\x89PNG\0")
    (here / "data" / "link.jsonl").symlink_to("a.jsonl")
    (here / "texts" / "gone.txt").symlink_to("nowhere")
    put(here / "looped" / "deep" / "a.txt", TEXTS[6])
    put(here / "looped" / "b.txt", TEXTS[7])
    (here / "looped" / "loop").symlink_to("..")
    os.mkfifo(here / "texts" / "pipe.txt")
    facts = init(capsys)
    said = {name: row["reason"] for name, row in facts["rows"].items() if row["reason"]}
    assert {name: reason[:14] for name, reason in said.items()} == {
        "data/README.md": "a file about t",
        "data/torn.parquet": "incomplete or ",
        "data/none.parquet": "empty",
        "texts/bad.txt": "not UTF-8 at b",
        "\\xfe.txt": "its name is no",
        "page.docx": "format .docx i",
        "all.tar.gz": "an archive (.t",
        "notes": "the name has n",
        "package.json": "one JSON objec",
        ".git/objects/a.jsonl": "below the hidd",
        ".hidden.txt": "hidden",
        "node_modules/x/readme.md": "installed pack",
        "pic.png": "format .png is",
        "data/link.jsonl": "a symbolic lin",
        "texts/gone.txt": "a symbolic lin",
        "looped/loop": "a symbolic lin",
        "texts/pipe.txt": "not a regular ",
    }
    taken = {name for name, row in facts["rows"].items() if row["use"] == "train"}
    assert taken == {
        *("data/a.jsonl", "data/b.csv", "texts/deep/one.txt", "texts/two.TXT", "texts/wide.txt"),
        *("texts/\\xff.txt", "looped/b.txt", "looped/deep/a.txt"),
    }
    found = read()
    counts = {name: len(texts) for name, texts in found.items()}
    assert counts == {"data": 40, "data_csv": 40, "looped": 2, "texts": 4}
    assert sorted(found["texts"]) == sorted(TEXTS[i] for i in (0, 1, 2, 4))
    assert main(["prep-mixture", "--dry-run"]) == 0


HUB = {"train": 0, "validation": 1, "test": 2}


def hub_files(here: Path, pattern: str, splits: Sequence[str] = tuple(HUB)) -> None:
    for split in splits:
        lines = json.dumps({"text": f"A text of the split called {split}."}) + "\n"
        put(here / pattern.format(split), lines)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("{}-00000-of-00001.jsonl", tuple(HUB)),
        ("data/{}-00000-of-00001.jsonl", tuple(HUB)),
        ("{}.jsonl", ("train", "dev", "test")),
        ("{}/a.jsonl", ("train", "valid", "test")),
        ("corpus/{}/deep/a.jsonl", ("train", "val", "eval")),
        ("data/wiki.{}.jsonl", ("training", "Validation", "TEST")),
        ("data/wiki_{}_1.jsonl", ("train", "dev", "test")),
    ],
)
def test_splits_by_the_conventions_of_the_hub_and_a_test_file_never_trains(
    here: Path, capsys: pytest.CaptureFixture[str], pattern: str, names: tuple[str, str, str]
) -> None:
    hub_files(here, pattern, names)
    facts = init(capsys)
    assert [facts[key]["files"] for key in ("taken", "held_out")] == [1, 2]
    for split, name in (("train", names[0]), ("valid", names[1])):
        (texts,) = read(split).values()
        assert texts == [f"A text of the split called {name}."]
    (plan,) = run_sources(Run("nmoe.toml"))
    assert plan.has_valid
    # Neither does one that comes later.
    put(here / pattern.format("test").replace("00000", "00001"), '{"text": "later"}\n')
    assert "later" not in str(read())


def test_a_validation_file_without_training_files_and_a_name_that_only_sounds_like_a_split(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(here / "contest.jsonl")
    put(here / "devices.txt", TEXTS[0])
    put(here / "other" / "valid-0.jsonl")
    facts = init(capsys)
    assert {one["source"] for one in facts["sources"]} == {"contest", "devices"}
    assert facts["rows"]["other/valid-0.jsonl"]["use"] == "valid"
    assert read("valid") == {}


def test_a_saved_dataset_keeps_its_splits(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    datasets = pytest.importorskip("datasets")
    splits = {name: datasets.Dataset.from_dict({"text": TEXTS[:9]}) for name in HUB}
    datasets.DatasetDict(splits).save_to_disk("saved")
    facts = init(capsys, "saved")
    uses = {name: row["use"] for name, row in facts["rows"].items() if name.endswith(".arrow")}
    assert sorted(uses.values()) == ["test", "train", "valid"]
    assert {name: len(texts) for name, texts in read("valid").items()} == {"saved": 9}


def test_files_of_one_directory_with_other_fields_of_text_are_other_sources(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(here / "web" / "a.jsonl", '{"text": "one text"}\n' * 3)
    put(here / "web" / "b.jsonl")
    put(here / "web" / "c.jsonl", '{"text": "another text"}\n')
    init(capsys)
    assert read() == {"web": TEXTS, "web_text": ["one text"] * 3 + ["another text"]}


def test_the_text_is_found_beside_names_titles_and_urls_and_past_a_long_first_record(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {
            "url": f"https://example.org/{'x' * 999}{i}",
            "title": f"The title {i}",
            "set": "one of the three sets of this corpus " * 50,
            "passage": text * (9_000 if i == 0 else 1),
        }
        for i, text in enumerate(TEXTS)
    ]
    put(here / "part-0.jsonl", "\n")
    put(here / "part-1.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    (source,) = init(capsys)["sources"]
    assert (source["text_field"], source["documents"]) == ("passage", 40)


def test_a_text_without_spaces_and_one_that_only_later_records_have_are_found(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"url": f"https://example.org/{i}", "nr": f"关于河流和山丘的短文 {i}"} for i in range(9)
    ]
    put(here / "zh.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    table = pa.table({"text": pa.array([None] * 99 + TEXTS), "url": ["https://a.example/b"] * 139})
    pq.write_table(table, here / "late.parquet")
    found = {one["source"]: one["text_field"] for one in init(capsys)["sources"]}
    assert found == {"late": "text", "zh": "nr"}


def test_lone_surrogates_and_control_characters_end_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [r'{"text": "a \ud800 lone surrogate and a \u0000 NUL", "\udfff": "b"}'] * 3
    put(here / "a.jsonl", "\n".join(lines))
    assert init(capsys)["sources"][0]["documents"] == 3
    assert main(["prep-mixture", "--dry-run"]) == 0


def test_few_documents_have_no_grader(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    english = [f"Note {i}: this is a short note about rivers and hills. " * 9 for i in range(68)]
    put(here / "a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in english))
    assert main(["init"]) == 0
    assert "68 documents are too few to fit a grader (at least 250" in capsys.readouterr().out
    assert Run("nmoe.toml").config.grading.grader == "none"


def test_many_text_files_of_a_directory_are_one_source_in_time_that_grows_with_them(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3000):
        put(here / f"{'abc'[number % 3]}x{number * 7919:x}y.txt", f"A note of number {number}.")
    (source,) = init(capsys)["sources"]
    assert (source["source"], source["files"], source["documents"]) == ("project", 3000, 3000)
    assert run_sources(Run("nmoe.toml"))[0].spec.paths == ("*.txt",)


def test_an_update_adds_what_is_new_and_changes_nothing_else(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(here / "in" / "part-1.jsonl")
    put(here / "in" / "gone.jsonl", '{"text": "a text to be removed"}\n')
    put(here / "in" / "odd.jsonl", "no record\n")
    init(capsys, "in")
    put(here / "outside.jsonl")
    path = here / "nmoe.toml"
    own = path.read_text().replace("seed = 42", "seed = 7  # mine")
    path.write_text(own)
    put(here / "in" / "part-2.jsonl", '{"body": "in the glob"}\n')
    assert "in the glob" in read()["part"]
    facts = init(capsys, "--update")
    assert ([one["source"] for one in facts["sources"]], path.read_text()) == (["odd"], own)
    assert facts["sources"][0]["problem"] is not None
    assert facts["rows"]["in/part-2.jsonl"]["source"] == "part"
    put(here / "in" / "new.csv", CSV)
    put(here / "in" / "odd.jsonl")
    put(here / "in" / "part.txt", TEXTS[0])
    facts = init(capsys, "--update")
    assert {one["source"] for one in facts["sources"]} == {"new", "odd", "part_files"}
    assert path.read_text().startswith(own.rstrip("\n"))
    assert read()["new"] == TEXTS
    assert Run("nmoe.toml").loader.seed == 7
    assert init(capsys, "--update")["sources"] == []
    # A source that the user removed stays away.
    text = path.read_text()
    start = text.index('[[mixtures.own.sources]]\nid = "gone"')
    end = text.index("\n\n", start)
    path.write_text(text[:start] + text[end:])
    facts = init(capsys, "--update")
    assert facts["sources"] == []
    assert "no longer named" in facts["rows"]["in/gone.jsonl"]["reason"]


def test_an_update_that_cannot_be_added_is_refused_and_changes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(here / "a.jsonl")
    init(capsys)
    path = here / "nmoe.toml"
    text = path.read_text()
    start = text.index("[[mixtures.own.sources]]")
    end = text.index("\n# Length of training", start)
    source = 'sources = [{id = "a", tokens_b = 1.0, kind = "jsonl", paths = ["a.jsonl"]}]\n'
    path.write_text(text[:start] + source + text[end:])
    before = path.read_bytes()
    put(here / "b.jsonl")
    assert 'id = "b"' in refused_line(capsys, "init", "--update")
    assert path.read_bytes() == before
    assert "--update" in refused_line(capsys, "init")


def test_a_listing_names_what_is_not_trained_on_and_adds_up(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(here / "a.jsonl", LINES + "no record\n")
    put(here / "test.jsonl")
    put(here / "page.docx", "<p>")
    assert main(["init"]) == 0
    said = capsys.readouterr().out
    sizes = [(here / name).stat().st_size for name in ("a.jsonl", "test.jsonl", "page.docx")]
    assert f"seen 3 ({sum(sizes):,} bytes) = taken 1 ({sizes[0]:,} bytes)" in said
    assert f"held out 1 ({sizes[1]:,} bytes) + left out 1 ({sizes[2]:,} bytes)" in said
    assert "a: unreadable records: 1, such as" in said
    assert "format .docx is not supported" in said


def test_sources_take_files_of_a_valid_split_or_a_part_of_train_but_not_both() -> None:
    table = {"id": "a", "kind": "jsonl", "paths": ["a"], "valid_paths": ["b"]}
    with pytest.raises(ValueError, match="not both"):
        validate(SourceSpec, table | {"valid_split": "train[:1%]"}, "test")
    with pytest.raises(ValueError, match="takes hf_valid_split, not valid_paths"):
        validate(SourceSpec, {"id": "a", "hf_dataset": "x/y", "valid_paths": ["b"]}, "test")
    spec = validate(SourceSpec, table, "test")
    plain = spec.model_copy(update={"valid_paths": ()})
    assert spec.reading_digest("train") == plain.reading_digest("train")
    assert spec.reading_digest("valid") != plain.reading_digest("valid")


def test_a_survey_stops_after_so_many_records_of_few_characters(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small Parquet file may hold a thousand million nulls."""
    module = importlib.import_module("nmoe_core.cli.project.survey")
    monkeypatch.setattr(module, "_MOST_RECORDS", 45, raising=False)
    put(here / "a-1.jsonl", LINES)
    put(here / "a-2.jsonl", '{"body": null}\n' * 20)
    put(here / "a-3.jsonl", LINES + "not JSON\n" * 20)
    (source,) = init(capsys)["sources"]
    assert source["unreadable"] == 0


def test_a_file_whose_name_has_control_characters_and_bad_records_gives_valid_toml(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(here / "a\x1b[31m\u202e.jsonl", LINES + "not JSON\n")
    (source,) = init(capsys)["sources"]
    assert source["unreadable"] == 1
    assert [*map(len, read().values())] == [40]
