"""Files of tokens are read token by token, and refused with one error if they are damaged.

`golden/` has the same five documents as written by megatron-core 0.16.1 (an IndexedDatasetBuilder;
one document has two sequences), mosaicml-streaming 0.13.0 (MDSWriter), datatrove 0.10.1
(TokenizedFile) and datasets 5.2.0 (save_to_disk).
"""

import gzip
import random
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nmoe_core.base.errors import NmoeError
from nmoe_core.sources.records import Source
from tests.core.sources.read import opened, records, spans
from tests.refusals import refused

GOLDEN = Path(__file__).parent / "golden"
EOS = 0
DOCUMENTS = [[5, 6, 7], [300, 2, 1], [9] * 70, [399, 1], [17]]
WITH_EOS = [[*document, EOS] for document in DOCUMENTS]
FLAT = [token for document in WITH_EOS for token in document]
MAIN = {
    "megatron": "web.bin",
    "mds": "index.json",
    "datatrove": "00000.ds",
    "hf": "data-00000-of-00001.arrow",
}


def source(base: Path, form: str, *paths: str, **keys: Any) -> Source:
    named = list(paths) or [MAIN[form]]
    return opened(base, kind="tokens", format=form, paths=tuple(named), **keys).source


def tokens(source: Source) -> list[list[int]]:
    return [record.tokens.tolist() for record in records(source)]


def raw(path: Path, rows: Sequence[int] = FLAT, kind: str = "<u2", head: bytes = b"") -> None:
    path.write_bytes(head + np.array(rows, kind).tobytes())


def table(path: Path, rows: Sequence[str]) -> None:
    path.write_bytes(gzip.compress("".join(f"{row}\n" for row in rows).encode(), mtime=0))


def rows_of_table() -> list[str]:
    ends = np.cumsum([len(document) for document in WITH_EOS]).tolist()
    return [f"{a},{b},doc-{i},x.gz,{i}" for i, (a, b) in enumerate(zip([0, *ends], ends))]


def llmc(magic: int, version: int, count: int) -> bytes:
    return struct.pack("<3i", magic, version, count).ljust(1024, b"\0")


@pytest.mark.parametrize(
    ("directory", "form"),
    [
        ("megatron16", "megatron"),
        ("megatron32", "megatron"),
        ("mds_zstd", "mds"),
        ("mds_any", "mds"),
        ("mds_bytes", "mds"),
        ("datatrove2", "datatrove"),
        ("datatrove4", "datatrove"),
        ("hf", "hf"),
    ],
)
def test_files_of_each_tool_have_the_documents_that_it_wrote(directory: str, form: str) -> None:
    assert tokens(source(GOLDEN / directory, form)) == WITH_EOS


@pytest.mark.parametrize("kind", ["uint16", "uint32"])
def test_raw_files_have_the_documents_between_eos_tokens(tmp_path: Path, kind: str) -> None:
    raw(tmp_path / "a.npy", kind=kind)
    raw(tmp_path / "b.bin", [*FLAT, 8, 9], kind)
    keys = {"integers": kind, "eos_token_id": EOS}
    assert tokens(source(tmp_path, "olmo", "*.npy", **keys)) == WITH_EOS
    assert tokens(source(tmp_path, "nanogpt", "*.bin", **keys)) == [*WITH_EOS, [8, 9]]


def test_a_table_beside_a_file_gives_bounds_ids_and_the_type(tmp_path: Path) -> None:
    for name, kind in (("a", "<u2"), ("b", "<u4")):
        raw(tmp_path / f"{name}.npy", kind=kind)
        table(tmp_path / f"{name}.csv.gz", rows_of_table())
    found = records(source(tmp_path, "olmo", "*.npy", eos_token_id=EOS))
    assert [one.tokens.tolist() for one in found] == WITH_EOS * 2
    assert [one.id for one in found] == [f"doc-{i}" for i in range(5)] * 2


@pytest.mark.parametrize(("magic", "version", "kind"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")])
def test_a_header_of_llm_c_names_the_type(
    tmp_path: Path, magic: int, version: int, kind: str
) -> None:
    before = [EOS, *FLAT[:-1]]  # llm.c writes EOS before each document
    raw(tmp_path / "a.bin", before, kind, llmc(magic, version, len(before)))
    found = tokens(source(tmp_path, "nanogpt", "a.bin", eos_token_id=EOS))
    assert found == [[EOS], *WITH_EOS[:-1], DOCUMENTS[-1]]


@pytest.mark.parametrize("form", ["mds", "hf", "megatron"])
def test_packed_rows_are_joined_and_end_at_eos(tmp_path: Path, form: str) -> None:
    directory = GOLDEN / "mds_shape" if form == "mds" else tmp_path
    rows = [FLAT[i : i + 4] for i in range(0, len(FLAT), 4)]
    named = ["index.json"] if form == "mds" else ["*.parquet"]
    if form == "hf":
        pq.write_table(pa.table({"input_ids": rows}), tmp_path / "a.parquet")
    if form == "megatron":
        named = ["web.bin"]
        raw(tmp_path / "web.bin")
        (tmp_path / "web.idx").write_bytes(megatron_index([*map(len, rows)]))
    found = source(directory, form, *named, bounds="eos", eos_token_id=EOS)
    assert tokens(found) == [*WITH_EOS[:-1], WITH_EOS[-1][: len(WITH_EOS[-1])]]
    assert len(tokens(source(directory, form, *named))) == len(FLAT) // 4


def test_ids_come_from_a_named_column(tmp_path: Path) -> None:
    for directory, form in (("mds_zstd", "mds"), ("hf", "hf")):
        found = records(source(GOLDEN / directory, form, id_field="id"))
        assert [one.id for one in found] == [f"doc-{i}" for i in range(5)]
    assert records(source(GOLDEN / "megatron16", "megatron"))[3].id == "web/web.bin:3"
    numbers = records(source(GOLDEN / "mds_bytes", "mds", id_field="n"))
    assert [one.id for one in numbers] == list("01234")


FORMS = ["megatron", "olmo", "table", "datatrove", "nanogpt", "hf", "hf packed", "megatron packed"]


@pytest.mark.parametrize("form", FORMS)
def test_reading_goes_on_at_the_end_of_any_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr("nmoe_core.sources.forms.tokens.cut.BLOCK_TOKENS", 50)
    monkeypatch.setattr("nmoe_core.sources.forms.columns.BLOCK_BYTES", 100)
    lengths = random.Random(3).choices([1, 2, 7, 30, 49, 50, 51, 120], k=40)
    rows = [[1 + i % 90] * (n - 1) + [EOS] for i, n in enumerate(lengths)]
    keys: dict[str, Any] = {"eos_token_id": EOS}
    flat = [token for row in rows for token in row]
    ends = np.cumsum(lengths)
    is_packed = form.endswith("packed")
    parts = [flat[i : i + 11] for i in range(0, len(flat), 11)] if is_packed else rows
    keys |= {"bounds": "eos"} if is_packed else {}
    kind = {"table": "olmo"}.get(form, form.partition(" ")[0])
    match kind:
        case "megatron":
            named = "a.bin"
            raw(tmp_path / named, flat)
            (tmp_path / "a.idx").write_bytes(megatron_index([*map(len, parts)]))
        case "olmo" | "nanogpt":
            named = "a.bin" if form == "nanogpt" else "a.npy"
            raw(tmp_path / named, flat)
            if form == "table":
                table(tmp_path / "a.csv.gz", [f"{b - n},{b}" for n, b in zip(lengths, ends)])
            keys["integers"] = "uint16"
        case "datatrove":
            named = "a.ds"
            raw(tmp_path / named, flat)
            raw(tmp_path / "a.ds.index", ends.tolist(), "<u8")
        case _:
            named = "a.parquet"
            pq.write_table(pa.table({"input_ids": parts}), tmp_path / named, row_group_size=7)
    read = source(tmp_path, kind, named, **keys)
    assert tokens(read) == rows
    blocks = _shown(spans(read))
    assert len(blocks) > 5
    for i, (start, _, _) in enumerate(blocks):
        assert _shown(spans(read, start)) == blocks[i:]


def _shown(blocks: Sequence[Any]) -> list[Any]:
    return [(a, b, [(r.row, r.id, r.tokens.tolist()) for r in rows]) for a, b, rows in blocks]


def megatron_index(
    lengths: Sequence[int],
    *,
    version: int = 1,
    code: int = 8,
    bounds: Sequence[int] | None = None,
    moved: dict[int, int] | None = None,
) -> bytes:
    """An index; `moved` has other byte offsets of some sequences."""
    count = len(lengths)
    bounds = range(count + 1) if bounds is None else bounds
    places = 2 * (np.cumsum(lengths) - lengths)
    for i, place in (moved or {}).items():
        places[i] = place
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, code, count, len(bounds))
    columns = np.array(lengths, "<i4"), places.astype("<i8"), np.array(bounds, "<i8")
    return head + b"".join(column.tobytes() for column in columns)


LENGTHS = [len(document) for document in WITH_EOS]
BAD_INDEXES = {
    "version": (megatron_index(LENGTHS, version=2), "E-SOURCE-FORM"),
    "type": (megatron_index(LENGTHS, code=6), "E-SOURCE-FORM"),
    "magic": (b"TNTIDX\0\0" + megatron_index(LENGTHS)[8:], "E-SOURCE-FORM"),
    "short": (megatron_index(LENGTHS)[:-1], "E-SOURCE-BOUNDS"),
    "long": (megatron_index(LENGTHS) + b"\0", "E-SOURCE-BOUNDS"),
    "negative": (megatron_index([*LENGTHS[:-2], LENGTHS[-2] + 5, -3]), "E-SOURCE-BOUNDS"),
    "beyond": (megatron_index([*LENGTHS, 1]), "E-SOURCE-BOUNDS"),
    "less": (megatron_index(LENGTHS[:-1]), "E-SOURCE-BOUNDS"),
    "unsorted": (megatron_index(LENGTHS, bounds=[0, 2, 1, 5]), "E-SOURCE-BOUNDS"),
    "sequences": (megatron_index(LENGTHS, bounds=[0, 2, 6]), "E-SOURCE-BOUNDS"),
    "empty": (b"", "E-SOURCE-FORM"),
    "twice": (megatron_index(LENGTHS, moved={1: 0}), "E-SOURCE-BOUNDS"),
    "inside a token": (
        megatron_index(LENGTHS, moved={3: 2 * sum(LENGTHS[:3]) - 1}),
        "E-SOURCE-BOUNDS",
    ),
}


@pytest.mark.parametrize("name", BAD_INDEXES)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, name: str) -> None:
    index, code = BAD_INDEXES[name]
    raw(tmp_path / "web.bin")
    (tmp_path / "web.idx").write_bytes(index)
    with refused(code, naming=["web.idx"]):
        source(tmp_path, "megatron").check()


def test_sequences_may_lie_in_another_order(tmp_path: Path) -> None:
    raw(tmp_path / "web.bin", [*WITH_EOS[1], *WITH_EOS[0]])
    moved = {0: 2 * LENGTHS[1], 1: 0, 2: 0}
    (tmp_path / "web.idx").write_bytes(megatron_index([*LENGTHS[:2], 0], moved=moved))
    assert tokens(source(tmp_path, "megatron")) == [*WITH_EOS[:2], []]


def test_files_that_lack_a_part_are_refused(tmp_path: Path) -> None:
    raw(tmp_path / "web.bin")
    with refused("E-SOURCE-FORM", naming=["web.idx"]):
        source(tmp_path, "megatron")
    with refused("E-SOURCE-FORM", naming=["web.bin"]):
        source(tmp_path, "datatrove", "web.bin")
    shutil.copytree(GOLDEN / "mds_zstd", tmp_path / "mds")
    next((tmp_path / "mds").glob("shard*")).unlink()
    with refused("E-SOURCE-BOUNDS", naming=["index.json"]):
        source(tmp_path / "mds", "mds")


def test_a_link_beside_a_file_does_not_lead_out(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "in").mkdir()
    raw(tmp_path / "in" / "web.bin")
    (tmp_path / "other" / "secret").write_bytes(megatron_index(LENGTHS))
    (tmp_path / "in" / "web.idx").symlink_to(tmp_path / "other" / "secret")
    with refused("E-SOURCE-LINK", naming=["secret"]):
        source(tmp_path / "in", "megatron")


def test_raw_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    keys = {"eos_token_id": EOS, "integers": "uint16"}
    path = tmp_path / "a.npy"
    raw(path)
    with refused("E-SOURCE-EOS"):
        source(tmp_path, "olmo", "a.npy", integers="uint16")
    with refused("E-SOURCE-EOS", match="never occurs"):
        source(tmp_path, "olmo", "a.npy", **keys | {"eos_token_id": 44}).check()
    with refused("E-SOURCE-INTEGERS"):
        source(tmp_path, "olmo", "a.npy", eos_token_id=EOS).check()
    path.write_bytes(path.read_bytes() + b"x")
    with refused("E-SOURCE-TORN"):
        source(tmp_path, "olmo", "a.npy", **keys).check()
    raw(path, [5, 6, EOS] * 100, "<u4")
    with refused("E-SOURCE-INTEGERS"):
        source(tmp_path, "olmo", "a.npy", **keys).check()
    np.save(path, np.array(FLAT, np.uint16))
    with refused("E-SOURCE-FORM"):
        source(tmp_path, "olmo", "a.npy", **keys).check()
    for head, code in (
        (llmc(20240520, 2, len(FLAT)), "E-SOURCE-FORM"),
        (llmc(20240520, 1, len(FLAT) + 1), "E-SOURCE-BOUNDS"),
        (llmc(20240520, 1, len(FLAT))[:500], "E-SOURCE-TORN"),
    ):
        raw(tmp_path / "a.bin", FLAT if len(head) == 1024 else [], head=head)
        with refused(code):
            source(tmp_path, "nanogpt", "a.bin", **keys).check()


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        (["0,4", "5,8"], "E-SOURCE-BOUNDS"),
        (["1,4", "4,84"], "E-SOURCE-BOUNDS"),
        (["0,4", "4,2"], "E-SOURCE-BOUNDS"),
        (["0,4"], "E-SOURCE-BOUNDS"),
        (["0"], "E-SOURCE-FORM"),
        ([f"0,{10**30}"], "E-SOURCE-FORM"),
        (["a,b"], "E-SOURCE-TORN"),
        (["0,84", *["84,84"] * 84], "E-SOURCE-BOUNDS"),  # would fill the memory
        (["0," + "0" * 70_000 + "84"], "E-SOURCE-FORM"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(tmp_path: Path, rows: list[str], code: str) -> None:
    raw(tmp_path / "a.npy")
    table(tmp_path / "a.csv.gz", rows)
    with refused(code):
        source(tmp_path, "olmo", "a.npy", eos_token_id=EOS).check()


def test_files_of_datatrove_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with refused("E-SOURCE-MASK", naming=[".loss"]):
        source(GOLDEN / "datatrove_loss", "datatrove").check()
    shutil.copytree(GOLDEN / "datatrove2", tmp_path / "d")
    (tmp_path / "d" / "00000.ds.metadata").write_text("gpt2|4\n1\n1")
    with refused("E-SOURCE-INTEGERS"):
        source(tmp_path / "d", "datatrove").check()
    (tmp_path / "d" / "00000.ds.metadata").write_text("gpt2|3\n1\n1")
    with refused("E-SOURCE-FORM"):
        source(tmp_path / "d", "datatrove").check()
    raw(tmp_path / "d" / "00000.ds.index", [4, 3], "<u8")
    (tmp_path / "d" / "00000.ds.metadata").unlink()
    with refused("E-SOURCE-BOUNDS"):
        source(tmp_path / "d", "datatrove").check()


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("version", 3, "E-SOURCE-FORM"),
        ("format", "json", "E-SOURCE-FORM"),
        ("compression", "br", "E-SOURCE-FORM"),
        ("samples", 9, "E-SOURCE-BOUNDS"),
        ("column_names", ["id", "text"], "E-SOURCE-FORM"),
        ("column_encodings", ["str", "pkl"], "E-SOURCE-FORM"),
        ("column_sizes", [None, 4], "E-SOURCE-BOUNDS"),
        ("raw_data", {"basename": "x", "bytes": 10**12, "hashes": {}}, "E-SOURCE-BOUNDS"),
        ("zip_data", {"basename": "../x", "bytes": 1, "hashes": {}}, "E-SOURCE-FORM"),
    ],
)
def test_an_index_of_mds_that_does_not_fit_is_refused(
    tmp_path: Path, key: str, value: Any, code: str
) -> None:
    shutil.copytree(GOLDEN / "mds_zstd", tmp_path / "d")
    index = orjson.loads((tmp_path / "d" / "index.json").read_bytes())
    index["shards"][0][key] = value
    (tmp_path / "d" / "index.json").write_bytes(orjson.dumps(index))
    with refused(code):
        source(tmp_path / "d", "mds").check()


def test_a_shard_of_mds_with_another_checksum_is_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "mds_any", tmp_path / "d")
    shard = tmp_path / "d" / "shard.00000.mds"
    payload = bytearray(shard.read_bytes())
    payload[-1] ^= 1
    shard.write_bytes(payload)
    with refused("E-SOURCE-BOUNDS", naming=["sha1"]):
        source(tmp_path / "d", "mds").check()


def test_rows_without_tokens_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"input_ids": ["text"]}), tmp_path / "a.parquet")
    with refused("E-SOURCE-FIELD", naming=["list of tokens"]):
        source(tmp_path, "hf", "a.parquet").check()
    pq.write_table(pa.table({"input_ids": [[1, None]]}), tmp_path / "a.parquet")
    with refused("E-SOURCE-FORM", naming=["null"]):
        source(tmp_path, "hf", "a.parquet").check()
    with refused("E-SOURCE-FIELD", naming=["labels"]):
        source(tmp_path, "hf", "a.parquet", tokens_field="labels").check()


@pytest.mark.parametrize("directory", ["megatron16", "mds_zstd", "mds_any", "datatrove4", "hf"])
def test_damaged_bytes_are_read_or_refused_with_one_error(tmp_path: Path, directory: str) -> None:
    chance = random.Random(directory)
    form = directory.rstrip("0123456789").partition("_")[0]
    strange = None
    for trial in range(150):
        copy = tmp_path / str(trial)
        shutil.copytree(GOLDEN / directory, copy)
        path = chance.choice([path for path in sorted(copy.iterdir()) if path.is_file()])
        payload = bytearray(path.read_bytes())
        for _ in range(chance.choice([1, 1, 4])):
            payload[chance.randrange(len(payload))] = chance.randrange(256)
        if chance.random() < 0.2:
            del payload[chance.randrange(len(payload)) :]
        path.write_bytes(payload)
        try:
            read = source(copy, form)
            read.check()
            tokens(read)
        except NmoeError as error:
            strange = error.code if not error.code.startswith("E-SOURCE") else strange
        shutil.rmtree(copy)
    assert strange is None
