import itertools
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from loader import IndexReader, load_manifest, open_shard
from loader.files.format import read_json_object, resolve_inside
from loader.files.shard import read_npy_header
from tests.refusals import refused

MAGIC = b"\x93NUMPY"
_FIELDS = ("path", "index_path", "num_tokens", "num_documents", "checksum")
SHARD_FIELDS = [f"shards[1].{name}" for name in _FIELDS]


def npy(header: str | bytes, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode("latin-1") if isinstance(header, str) else header
    return MAGIC + version + struct.pack("<H", len(text)) + text + data


@pytest.fixture
def shard(tmp_path) -> Path:
    path = tmp_path / "web-v1-shard-000000.npy"
    np.save(path, np.arange(100, dtype="<u4"))
    return path


def test_shard_is_mapped_as_its_tokens(shard):
    tokens = open_shard(str(shard))
    assert type(tokens) is np.ndarray
    assert tokens.dtype == np.uint32
    np.testing.assert_array_equal(tokens, np.arange(100))
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1
    np.save(shard, np.empty(0, "<u4"))
    assert open_shard(shard).shape == (0,)
    # A padded header of another writer.
    header = "{'descr': '<u4', 'fortran_order': False, 'shape': (     2,), }".ljust(117) + "\n"
    for size in (118, 4096):
        shard.write_bytes(npy(header.ljust(size), b"\1\0\0\0\2\0\0\0"))
        assert open_shard(shard).tolist() == [1, 2]
    shard.write_bytes(npy(header.ljust(4097), b"\1\0\0\0\2\0\0\0"))
    with refused("E-SHARD-FORMAT", naming=["a header of 4097 bytes"]):
        open_shard(shard)


@pytest.mark.parametrize("size", [0, 1, 5, 7, 9, 10, 60, 127, 128, 129, 132, 524, 527, 529, 532])
def test_shard_cut_or_grown_to_any_length_is_refused(shard, size):
    whole = shard.read_bytes()
    assert len(whole) == 528
    shard.write_bytes((whole + b"\0" * 8)[:size])
    code = "E-SHARD-FORMAT" if size < 128 else "E-SHARD-TRUNCATED"  # the header's length
    with refused(code, naming=[str(shard)]):
        open_shard(shard)


def test_pickles_are_refused_and_never_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    np.save(tmp_path / "a.npy", np.array([Bomb()], dtype=object), allow_pickle=True)
    with refused("E-SHARD-FORMAT"):
        open_shard(tmp_path / "a.npy")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "payload",
    [
        npy("{'descr': '<u4', 'fortran_order': True, 'shape': (1,), }", b"\0" * 4),
        *(
            npy(f"{{'descr': '<u4', 'fortran_order': False, 'shape': {shape}, }}", b"\0" * 4)
            for shape in ("(-1,)", "(True,)", "(1.0,)", "[1]", f"({2**60},)", "(1,), 'x': 1")
        ),
        npy("{'descr': '<u4', 'shape': (0,)}"),
        *(npy(text) for text in ("[]", "__import__('os').abort()", "(" * 3000, "")),
        *(npy(text) for text in (b"\0" * 50, b"\xff" * 50)),
        npy("{'descr': '<u4', 'fortran_order': False, 'shape': (0,)}", b"", b"\x02\x00"),
        MAGIC + b"\x01\x00" + b"\xff\xff" + b"{" * 65535,
        b"PK\x03\x04" + b"\0" * 200,
        *(np.arange(6, dtype=kind) for kind in (">u4", "<i4", "<u8", "<f4")),
        np.arange(6, dtype="<u4").reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype="<u4").reshape(2, 3)),
        np.array(5, "<u4"),
        np.array([(1, 2)], dtype=[("a", "<u4"), ("b", "<u4")]),
    ],
    ids=range(25),
)
def test_hostile_headers_and_arrays_of_another_type_or_shape_are_refused(shard, payload):
    if isinstance(payload, bytes):
        shard.write_bytes(payload)
    else:
        np.save(shard, payload)
    for read in (read_npy_header, open_shard):
        with refused("E-SHARD-FORMAT"):
            read(shard)


def test_missing_files_and_a_header_that_promises_terabytes_have_their_codes(tmp_path):
    header = "{'descr': '<u4', 'fortran_order': False, 'shape': (" + str(2**47) + ",), }"
    (tmp_path / "long.npy").write_bytes(npy(header, b"\0" * 4))
    with refused("E-SHARD-TRUNCATED"):
        open_shard(tmp_path / "long.npy")
    with refused("E-SHARD-MISSING"):
        open_shard(tmp_path / "a.npy")
    with refused("E-INDEX-MISSING", naming=["regenerate-index"]):
        IndexReader(tmp_path / "a.idx")
    with refused("E-MANIFEST-MISSING"):
        load_manifest(tmp_path / "manifest.json")


def idx(spans: list[tuple[int, int]], magic=b"NMOEIDX\0", version=1, num_docs=None) -> bytes:
    count = len(spans) if num_docs is None else num_docs
    return struct.pack("<8sQQQ", magic, version, count, 0) + b"".join(
        struct.pack("<QQ", *span) for span in spans
    )


def test_index_gives_its_documents(tmp_path):
    path = tmp_path / "a.idx"
    path.write_bytes(idx([(0, 3), (3, 4), (4, 9)]))
    reader = IndexReader(path)
    assert reader.num_docs == 3
    assert reader.get_document(1) == (3, 4)
    assert reader.to_array().tolist() == [[0, 3], [3, 4], [4, 9]]
    for i in (-1, 3):
        with pytest.raises(IndexError):
            reader.get_document(i)
    path.write_bytes(idx([]))
    assert IndexReader(path).to_array().shape == (0, 2)


@pytest.mark.parametrize(
    "payload",
    [
        *(b"", b"NMOEIDX\0", idx([])[:31], idx([(0, 3)])[:40]),
        *(idx([(0, 3)]) + b"\0", idx([(0, 3)]) + b"\0" * 16),
        idx([(0, 3)], magic=b"NMOEIDX1"),
        *(idx([(0, 3)], version=version) for version in (0, 2)),
        *(idx([(0, 3)], num_docs=n) for n in (0, 2, 2**60, 2**64 - 1)),
        *(idx([span]) for span in ((1, 3), (0, 0))),
        *(idx([(0, 3), span]) for span in ((3, 3), (4, 5), (2, 5))),
        *(idx([(0, 5), (5, 2)]), idx([(0, 2**64 - 1), (2**64 - 1, 0)])),
    ],
    ids=range(20),
)
def test_hostile_indexes_are_refused(tmp_path, payload):
    (tmp_path / "a.idx").write_bytes(payload)
    with refused("E-INDEX-FORMAT"):
        IndexReader(tmp_path / "a.idx")


@pytest.fixture
def manifest(tree) -> Path:
    return tree.add("web", 500)


def edit(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_manifest_gives_its_fields_and_keeps_unknown_ones(manifest):
    edit(manifest, lambda whole: whole.update(schema_version=1, later={"a": 1}))
    read = load_manifest(manifest)
    assert (read.dataset, read.total_tokens, read.num_shards) == ("web", 500, 3)
    assert read.extra["later"] == {"a": 1}
    assert read.shard_path(read.shards[1]).is_file()
    assert len(read.content_digest()) == 64


@pytest.mark.parametrize(
    "hostile",
    [
        *("..", "../", "../web.npy", "a/../../b.npy", "/etc/passwd", "link/a.npy"),
        *("a\0b.npy", "a\\b.npy", ""),
        pytest.param("a" * 300, id="no name of a file"),
        pytest.param("\ud800", id="no text"),
    ],
)
@pytest.mark.parametrize("key", ["path", "index_path"])
def test_paths_that_leave_the_directory_are_refused(manifest, tmp_path, key, hostile):
    (manifest.parent / "link").symlink_to(tmp_path)
    (manifest.parent / "within").symlink_to(manifest.parent / "shard_0000")
    assert resolve_inside(manifest.parent, "within/a.npy")
    edit(manifest, lambda value: value["shards"][0].update({key: hostile}))
    with refused("E-PATH-ESCAPE"):
        load_manifest(manifest)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("dataset", None), ("dataset", 5), ("version", ["v1"]), ("tokenizer", {})],
        *[("dtype", "uint8"), *(("vocab_size", value) for value in ("1000", 1000.0, True))],
        *[("eos_token_id", -1), ("eos_token_id", 1000), ("total_tokens", 501), ("num_shards", 2)],
        *[("total_documents", 0), ("shards", {}), ("shards", [1]), ("shards", None)],
        *[("schema_version", 2), ("schema_version", "1")],
        *itertools.product(SHARD_FIELDS, (None, -1, 1.5, [], False)),
    ],
)
def test_fields_of_the_wrong_type_or_value_are_refused(manifest, key, value):
    _, of_shard, field = key.rpartition("shards[1].")
    edit(manifest, lambda m: (m["shards"][1] if of_shard else m).update({field: value}))
    with refused("E-MANIFEST-FORMAT", naming=[str(manifest), of_shard and key]):
        load_manifest(manifest)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", '"text"', '{"total_tokens": NaN}', '{"total_tokens": Infinity}'),
        '{"dataset": "a", "dataset": "b"}',
        '{"shards": [{"path": "a", "path": "b"}]}',
        "[" * 200_000,
        '{"a":' * 200_000,
        '{"total_tokens": 1' + "0" * 5000 + "}",
        '{"dataset": "\xff',
    ],
    ids=range(13),
)
def test_texts_that_are_no_manifest_are_refused(tmp_path, text):
    path = tmp_path / "manifest.json"
    path.write_bytes(text.encode("latin-1"))
    with refused("E-MANIFEST-FORMAT"):
        load_manifest(path)


def test_an_object_of_at_most_so_many_bytes_is_read(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text("{}")
    assert read_json_object(path, 2) == {}
    with refused("E-MANIFEST-FORMAT", naming=["2 bytes", "at most 1"]):
        read_json_object(path, 1)
