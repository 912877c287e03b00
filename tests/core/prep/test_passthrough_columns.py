"""Passthrough columns: every document has its values, in shard order, with the source's types.

A column is kept whatever the workers, the shards of a run, or the moment at which it was ended.
"""

import datetime
import json
import resource
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.base.compute.tables import ComputeTable
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.prep.run import PrepSettings, prep_shards
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.records import Rows, Split
from tests.core.prep.conftest import Web, read_documents, tree_digest
from tests.core.sources.read import opened
from tests.project import json_lines, jsonl_source, read_rows, said, write_project
from tests.refusals import refused, refused_line

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

COLUMNS = ("url", "meta.n", "meta", "rare")


def _rich(documents: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """The documents with more fields; whole numbers become numbers late, `rare` comes later yet."""
    rows: list[dict[str, Any]] = []
    for i, document in enumerate(documents):
        row: dict[str, Any] = {**document, "meta": {"n": i if i < 200 else i + 0.5}}
        if i % 3:
            row["url"] = f"https://{i}"
        if i == 290:
            row["rare"] = True
        rows.append(row)
    return rows


@pytest.fixture
def kept(web: Web, documents: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> Web:
    """The source with more fields, four of which are kept."""
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", 4096)
    Path(web.source.files[0].path).write_text(json_lines(_rich(documents)), encoding="utf-8")
    source = JsonlSource(web.source.reading._replace(kept=COLUMNS), web.source.files)
    return replace(web.with_(columns=COLUMNS), source=source)


def _ids(shard: Path) -> list[dict[str, str]]:
    return read_rows(*sorted(shard.glob("*.ids.jsonl")))


def _read(shard: Path) -> list[dict[str, Any]]:
    return pq.read_table(shard / "columns.parquet").to_pylist()


def test_a_pass_over_many_shards_may_open_the_files_of_their_columns_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.prep.journal._FIRST_INTERVAL_S", 0.0)
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", 2**15)
    rows = [{"id": str(i), "text": f"reef {i}", "c": i} for i in range(2000)]
    (tmp_path / "a.jsonl").write_text(json_lines(rows))
    split = opened(tmp_path, kind="jsonl", paths=("a.jsonl",), columns=("c",))
    settings = PrepSettings(name="web", num_shards=150, columns=("c",), min_doc_tokens=1)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        report = prep_shards(split, settings, tmp_path / "train")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert report.num_documents == 2000


def test_every_document_has_its_values_in_the_order_of_the_shard(
    kept: Web, documents: list[dict[str, str]]
) -> None:
    kept = kept.with_(tokens_per_shard=4000)  # several files in a shard
    kept.prep()
    by_id = {row["id"]: row for row in _rich(documents)}
    for shard in sorted(kept.out.glob("shard_*")):
        ids, rows = _ids(shard), _read(shard)
        assert len(list(shard.glob("*.npy"))) > 1
        assert [bytes.fromhex(line["text_sha256"]) for line in ids] == [
            row["text_sha256"] for row in rows
        ]
        for line, row in zip(ids, rows):
            source = by_id[line["id"]]
            assert row["url"] == source.get("url")
            assert row["meta.n"] == float(source["meta"]["n"])
            assert json.loads(row["meta"]) == source["meta"]
            assert row["rare"] == source.get("rare")
        lengths = [row["doc_id"].rpartition("#s=")[2].split(":e=") for row in rows]
        found = [int(end) - int(start) for start, end in lengths]
        assert found == [len(tokens) for tokens in read_documents(shard)]
        assert rows[0]["doc_id"].startswith(f"{kept.out.parent.name}//")


@pytest.mark.usefixtures("frequent_commits")
def test_bytes_do_not_depend_on_workers_shards_or_interruptions(kept: Web, tmp_path: Path) -> None:
    kept = replace(kept, out=tmp_path / "a" / "web" / "train")
    kept.prep()
    many = kept.with_(compute=ComputeTable(workers=3)).at(tmp_path / "b" / "web" / "train")
    many.prep()
    apart = kept.at(tmp_path / "c" / "web" / "train")
    for bucket in (2, 0, 3, 1):
        apart.shards([bucket])
    apart.prep()
    ended = kept.at(tmp_path / "d" / "web" / "train")
    ended.interrupt()
    assert ended.prep().documents_tokenized < 300
    forced = kept.at(tmp_path / "e" / "web" / "train")
    forced.prep()
    forced.prep(existing="remake")
    assert many.digest() == apart.digest() == ended.digest() == forced.digest() == kept.digest()


@pytest.mark.usefixtures("frequent_commits")
def test_the_kinds_of_values_before_an_interruption_decide_a_column_s_type(
    kept: Web, documents: list[dict[str, str]], tmp_path: Path
) -> None:
    rows = [{**one, "url": i if i >= 50 else "none"} for i, one in enumerate(_rich(documents))]
    Path(kept.source.files[0].path).write_text(json_lines(rows), encoding="utf-8")
    ended = kept.at(tmp_path / "a" / "web" / "train")
    ended.interrupt()
    ended.prep()
    fresh = kept.at(tmp_path / "b" / "web" / "train")
    fresh.prep()
    assert ended.digest() == fresh.digest()
    schema = pq.read_schema(fresh.out / "shard_0000" / "columns.parquet")
    assert str(schema.field("url").type) == "string"


@pytest.mark.parametrize("budget", [3000, 12_000, 25_000])
def test_a_partial_pass_under_a_budget_has_the_types_of_the_whole(
    kept: Web, tmp_path: Path, budget: int
) -> None:
    whole = kept.with_(max_tokens=budget, needs_columns=False).at(tmp_path / "a" / "web" / "train")
    part = whole.at(tmp_path / "b" / "web" / "train")
    whole.prep()
    part.prep()
    before = part.digest()
    (part.out / "shard_0001" / "columns.parquet").unlink()
    assert part.shards().made == [1]
    part.prep()
    assert part.digest() == before == whole.digest()


def test_shards_without_columns_are_those_of_before(web: Web, tmp_path: Path, kept: Web) -> None:
    plain = replace(kept.with_(columns=()), source=web.source).at(tmp_path / "plain" / "train")
    plain.prep()
    kept.prep()
    names = [name for name in plain.digest() if not name.endswith(("manifest.json", ".lines"))]
    assert {name: plain.digest()[name] for name in names}.items() <= kept.digest().items()
    info = json.loads((plain.out / "shard_0000" / "manifest.json").read_text())["source_info"]
    assert not [key for key in info if key.startswith("columns")]
    assert plain.settings.identity().keys() == PrepSettings().identity().keys()


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([True, False, None], "bool"),
        ([1, -(2**63), None], "int64"),
        ([1, 2.5], "double"),
        (["a", "", None, "\ud800"], "string"),
        ([1, True], "string"),
        ([1, "1", [1], {"a": None}], "string"),
        ([2**63, 1], "string"),
        ([None, None], "null"),
    ],
)
@pytest.mark.parametrize("block", [64, 2**21])
def test_a_column_of_json_has_the_type_of_all_its_values(
    tmp_path: Path, values: list[Any], kind: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", block)
    rows = [{"id": str(i), "text": f"text {i} " * 20, "c": v} for i, v in enumerate(values)]
    (tmp_path / "a.jsonl").write_text(json_lines(rows), encoding="utf-8")
    split = opened(tmp_path, kind="jsonl", paths=("a.jsonl",), columns=("c",))
    prep_shards(split, PrepSettings(name="web", num_shards=1, columns=("c",)), tmp_path / "train")
    shard = tmp_path / "train" / "shard_0000"
    table = pq.read_table(shard / "columns.parquet")
    assert str(table.schema.field("c").type) == kind
    found = dict(zip([line["id"] for line in _ids(shard)], table.column("c").to_pylist()))
    for i, value in enumerate(values):
        if kind == "string" and not isinstance(value, str | None):
            assert json.loads(found[str(i)]) == value
        else:
            assert found[str(i)] == ("\\ud800" if value == "\ud800" else value)


def _typed_table() -> Any:
    when = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901)
    columns = {
        "id": [f"d{i}" for i in range(30)],
        "data": [{"text": f"some text number {i} " * 5, "when": when} for i in range(30)],
        "small": pa.array([None, *range(29)], pa.int16()),
        "exact": pa.array([Decimal("1.50")] * 30, pa.decimal128(9, 2)),
        "tags": [["a", None], None, []] * 10,
        "pairs": pa.array([[("k", 1)]] * 30, pa.map_(pa.string(), pa.int32())),
        "raw": pa.array([b"\xff\x00"] * 30, pa.large_binary()),
        "kind": pa.array(["x", "y", None] * 10).dictionary_encode(),
    }
    return pa.table(columns)


KEPT = ("data.when", "small", "exact", "tags", "pairs", "raw", "kind")


@pytest.mark.parametrize("kind", ["parquet", "arrow", "huggingface"])
def test_columns_of_arrow_keep_their_types_and_paths_lead_into_structs(
    tmp_path: Path, kind: str
) -> None:
    table, place = _typed_table(), tmp_path / "in"
    place.mkdir()
    if kind == "arrow":
        with pa.OSFile(str(place / "a"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
            out.write_table(table, max_chunksize=7)
    else:
        table = table.drop_columns(["pairs"]) if kind == "huggingface" else table
        pq.write_table(table, place / "a.parquet", row_group_size=7)
    where = {"hf_dataset": "in"} if kind == "huggingface" else {"paths": ("in/*",)}
    kept = tuple(name for name in KEPT if name.split(".")[0] in table.schema.names)
    fields = {"text_field": "data.text", "id_field": "id"}
    split = opened(tmp_path, kind=kind, columns=kept, **fields, **where)
    prep_shards(split, PrepSettings(name="web", num_shards=1, columns=kept), tmp_path / "train")
    shard = tmp_path / "train" / "shard_0000"
    found, source = pq.read_table(shard / "columns.parquet"), table.flatten().flatten()
    assert found.schema.names == ["doc_id", "text_sha256", *kept]
    order = [int(line["id"][1:]) for line in _ids(shard)]
    assert sorted(order) == list(range(30))
    for name in kept:
        expected = source.column(name).take(order).combine_chunks()
        if pa.types.is_dictionary(expected.type):
            expected = expected.dictionary_decode()
        if kind != "huggingface":  # whose reader has types of its own for texts and bytes
            assert found.schema.field(name).type == expected.type
        assert found.column(name).to_pylist() == expected.to_pylist()


def test_columns_of_several_files_widen_or_are_refused_and_may_be_missing_in_one(
    tmp_path: Path,
) -> None:
    texts = [f"some text of document {i} " * 5 for i in range(8)]
    types = {"a": pa.int16(), "b": pa.int64(), "c": pa.string()}
    for name, type_ in types.items():
        table = pa.table({"text": texts, "n": pa.array(range(8), pa.int16()).cast(type_)})
        table = table.append_column("m", pa.array(range(8))) if name == "b" else table
        pq.write_table(table, tmp_path / f"{name}.parquet")
    settings = PrepSettings(name="web", num_shards=1, columns=("n", "m"))

    def split(*names: str) -> Split:
        paths = tuple(f"{name}.parquet" for name in names)
        return opened(tmp_path, kind="parquet", paths=paths, columns=("n", "m"))

    prep_shards(split("a", "b"), settings, tmp_path / "train")
    table = pq.read_table(tmp_path / "train" / "shard_0000" / "columns.parquet")
    assert [str(table.schema.field(name).type) for name in ("n", "m")] == ["int64", "int64"]
    assert (table.column("n").null_count, table.column("m").null_count) == (0, 8)
    with refused("E-SOURCE-FIELD", "incompatible types", naming=["web", "int", "string"]):
        prep_shards(split("b", "c"), settings, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_that_no_record_has_is_refused_with_those_that_there_are(
    tmp_path: Path, kind: str
) -> None:
    rows = [{"text": f"some text {i} " * 9, "meta": {"lang": "en"}} for i in range(9)]
    (tmp_path / "a.jsonl").write_text(json_lines(rows), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    kept = ("meta.lang", "meta.lnag")
    split = opened(tmp_path, kind=kind, paths=(f"a.{kind}",), columns=kept)
    settings = PrepSettings(name="web", num_shards=2, columns=kept)
    with refused("E-SOURCE-FIELD", naming=["found text, meta, meta.lang,", "meta.lnag", "web"]):
        prep_shards(split, settings, tmp_path / "train")
    assert not (tmp_path / "train").exists()
    valid = Split(split.source, Rows(0, 4))
    prep_shards(valid, settings.model_copy(update={"needs_columns": False}), tmp_path / "valid")
    found = [row["meta.lnag"] for k in (0, 1) for row in _read(tmp_path / f"valid/shard_000{k}")]
    assert found == [None] * 4


@pytest.mark.parametrize(("after", "num_warnings"), [(3, 1), (9, 1), (10, 0)])
def test_a_column_that_many_records_lack_is_named_once_before_the_source_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    after: int,
    num_warnings: int,
) -> None:
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", 256)
    monkeypatch.setattr("nmoe_core.prep.passthrough_columns._WARN_ROWS", after)
    rows = [{"text": f"some text {i} " * 9, "lang": "en"} for i in range(9)]
    (tmp_path / "a.jsonl").write_text(json_lines(rows), encoding="utf-8")
    kept = ("lang", "url")
    split = opened(tmp_path, kind="jsonl", paths=("a.jsonl",), columns=kept)
    with refused("E-SOURCE-FIELD"):
        prep_shards(split, PrepSettings(name="web", num_shards=2, columns=kept), tmp_path / "train")
    assert caplog.text.count("web: no record has column url so far;") == num_warnings


def test_a_run_keeps_the_columns_of_its_attributes_and_a_source_may_say_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"id": f"d{i}", "text": f"text {i} " * 20, "url": f"u{i}", "n": i} for i in range(40)]
    sources = [jsonl_source("web", rows), jsonl_source("books", rows, columns=["n"])]
    plain = jsonl_source("plain", rows, columns=[])
    settings = {"attributes": {"columns": ["url"]}}
    project = write_project(tmp_path, [*sources, plain], settings)
    config = str(project.config)
    assert main(["prep-mixture", "--config", config]) == 0
    data = project.run.tree.data
    names = {
        source: pq.read_schema(data / source / "train/shard_0000/columns.parquet").names[2:]
        for source in ("web", "books")
    }
    assert names == {"web": ["url"], "books": ["n"]}
    assert not list((data / "plain").rglob("columns.parquet"))

    row = _read(data / "web/train/shard_0000")[3]
    explained = said(capsys, "explain", row["doc_id"], "--config", config)
    assert explained["columns"] == {"url": row["url"]}
    manifest = str(data / "web/train/manifest.json")
    (column,) = said(capsys, "inspect", "--manifest", manifest, "--all")["columns"]
    assert (column["column"], column["type"], column["missing"]) == ("url", "string", 0)
    for form in ("mds", "olmo"):
        assert main(["export", form, manifest, "--output", str(tmp_path / form)]) == 0
        exported = pq.read_table(tmp_path / form / "columns.parquet").to_pylist()
        shards = [data / f"web/train/shard_000{k}" for k in (0, 1)]
        ids = [row.pop("ingest_id") for row in exported]
        assert exported == [row for shard in shards for row in _read(shard)]
        assert ids == [f"d{row['url'][1:]}" for row in exported]

    assert main(["verify", manifest, "--checksums"]) == 0
    damaged = data / "web/train/shard_0001/columns.parquet"
    payload = bytearray(damaged.read_bytes())
    payload[len(payload) // 2] ^= 1
    damaged.write_bytes(payload)
    line = refused_line(capsys, "verify", manifest, "--checksums", code="E-SHARD-CHECKSUM")
    assert "columns.parquet" in line


@pytest.mark.parametrize(
    ("columns", "match"), [(["url", "url"], "twice"), (["doc_id"], "called"), ([""], "at least 1")]
)
def test_columns_that_cannot_be_kept_are_refused_before_anything_is_read(
    tmp_path: Path, columns: list[str], match: str
) -> None:
    rows = [{"text": "a text"}]
    settings = {"attributes": {"columns": columns}}
    project = write_project(tmp_path, [jsonl_source("web", rows)], settings)
    with refused("E-CONFIG", match):
        Run(project.config)
    (tmp_path / "a.txt").write_text("a text")
    with refused("E-CONFIG", "does not take columns"):
        opened(tmp_path, kind="files", paths=("a.txt",), columns=("url",))


def test_one_source_is_prepared_with_columns_from_the_command_line_and_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nmoe_core import JSONLSource, ParallelPrepPipeline, PrepConfig

    monkeypatch.chdir(tmp_path)
    rows = [{"data": {"text": f"text {i} " * 20}, "id": f"d{i}", "n": i} for i in range(40)]
    Path("a.jsonl").write_text(json_lines(rows), encoding="utf-8")
    flags = ["--source", "jsonl", "--paths", "a.jsonl", "--text-field", "data.text"]
    flags += ["--output", "one/web/train", "--name", "web", "--num-shards", "2"]
    assert main(["prep", *flags, "--set=attributes.columns=n"]) == 0
    config = PrepConfig(
        output_dir="two/web/train", dataset_name="web", num_shards=2, columns=("n",)
    )
    ParallelPrepPipeline(JSONLSource("a.jsonl", text_field="data.text"), config).run()
    assert tree_digest(Path("one")) == tree_digest(Path("two"))
    assert _read(Path("one/web/train/shard_0001"))[0]["n"] in range(40)


def test_a_split_that_grows_keeps_columns_as_a_fresh_one(tmp_path: Path) -> None:
    rows = [{"id": f"d{i}", "text": f"text {i} " * 20, "url": f"u{i}"} for i in range(60)]
    project = write_project(
        tmp_path, [jsonl_source("web", rows[:40])], {"attributes": {"columns": ["url"]}}
    )
    argv = ["prep-mixture", "--config", str(project.config)]
    assert main(argv) == 0
    rows[3]["url"] = "another"  # of the same text
    (tmp_path / "in" / "web.jsonl").write_text(json_lines(rows[1:]), encoding="utf-8")
    assert main(argv) == 0
    grown = tree_digest(project.run.tree.data)
    assert main([*argv, "--force"]) == 0
    assert tree_digest(project.run.tree.data) == grown
    shards = project.run.tree.shards("web", 2)
    found = {row["url"] for shard in shards for row in _read(shard.directory)}
    assert found == {row["url"] for row in rows[1:]}
