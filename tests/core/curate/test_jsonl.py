import gzip
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe_core.base.errors import CurationError
from nmoe_core.curate.jsonl.record_files import (
    JsonlPaths,
    scan_jsonl,
    write_records,
    write_set_aside,
)
from nmoe_core.curate.topics.clusters import typical_terms
from tests.refusals import refused

RECORDS = st.dictionaries(st.sampled_from(["id", "x"]), st.integers() | st.text(), max_size=2)
GOOD = st.builds(
    lambda extra, text, is_ascii: json.dumps(extra | {"text": text}, ensure_ascii=is_ascii),
    RECORDS,
    st.text(st.characters(blacklist_categories=("Cs",)), max_size=12),
    st.booleans(),
).map(str.encode)
BAD = st.sampled_from([b"{", b"3", b"[]", b'{"x":1}', b'{"text":[]}', b"\xfe\xff", b"nul"])
BLANK = st.sampled_from([b"", b" ", b"\t", b"\r"])
LINES = st.lists(
    st.tuples(st.just("good"), GOOD)
    | st.tuples(st.just("bad"), BAD)
    | st.tuples(st.just("blank"), BLANK),
    max_size=12,
)


@settings(max_examples=150)
@given(LINES, st.sampled_from([b"\n", b"\r\n"]), st.booleans(), st.booleans(), st.randoms())
def test_a_reordered_file_holds_every_line_once_byte_for_byte(
    tmp_path_factory, lines, line_end, has_last_end, has_mark, random
):
    kinds = Counter(kind for kind, _ in lines)
    directory = tmp_path_factory.mktemp("lines")
    raw = line_end.join(line for _, line in lines) + (line_end if has_last_end else b"")
    path = directory / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" * has_mark + raw)
    if not kinds["good"]:
        with pytest.raises(CurationError):
            scan_jsonl(path, on_error="set-aside")
        return
    records = scan_jsonl(path, on_error="set-aside")
    assert len(records) == kinds["good"]
    order = list(range(len(records)))
    random.shuffle(order)
    write_records(directory / "out.jsonl", records, np.array(order))
    write_set_aside(directory / "rest.jsonl", records)
    expected = {kind: [] for kind in ("good", "bad", "blank")}
    for line in raw.split(b"\n"):  # what the file holds between line ends
        for kind, known in lines:
            if line.removesuffix(b"\r") == known.removesuffix(b"\r"):
                expected[kind].append(line)
                break
    written = (directory / "out.jsonl").read_bytes()
    assert written.endswith(b"\n")
    assert written.split(b"\n")[:-1] == [expected["good"][i] for i in order]
    if kinds["bad"]:
        rest = (directory / "rest.jsonl").read_bytes()
        assert rest.split(b"\n")[:-1] == expected["bad"]
    else:
        assert not (directory / "rest.jsonl").exists()


def test_a_refusal_names_the_first_bad_lines_and_how_many_there_are(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + b"broken\n" * 7)
    with refused("E-CURATION-LINE", naming=["7 lines", "line 2:", "and 2 more"]):
        scan_jsonl(path)


def test_lone_surrogates_are_read_and_their_lines_kept(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "a\\ud800b"}\n')
    records = scan_jsonl(path)
    assert list(records.texts(np.array([0]))) == ["a\ufffd\ufffd\ufffdb"]
    write_records(tmp_path / "out.jsonl", records, np.array([0]))
    assert (tmp_path / "out.jsonl").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".zst", zstandard.compress)]
)
def test_a_compressed_file_is_read_as_the_plain_one_and_refused_when_cut(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
):
    payload = b'\xef\xbb\xbf{"text": "a"}\n\nbroken\n{"text": "\xc3\xa9"}'
    plain, packed = tmp_path / "in.jsonl", tmp_path / f"in.jsonl{suffix}"
    plain.write_bytes(payload)
    packed.write_bytes(compress(payload))
    written = []
    for path in (plain, packed):
        records = scan_jsonl(path, on_error="set-aside")
        write_records(tmp_path / "out.jsonl", records, np.array([1, 0]))
        write_set_aside(tmp_path / "rest.jsonl", records)
        made = [(tmp_path / name).read_bytes() for name in ("out.jsonl", "rest.jsonl")]
        written.append([*made, records.sha256, JsonlPaths(path, tmp_path, tmp_path).token_counts])
    assert written[0] == written[1]
    packed.write_bytes(packed.read_bytes()[:-9])
    with refused("E-SOURCE-TORN", re.escape(str(packed))):
        scan_jsonl(packed)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path):
    with refused("E-CURATION-INPUT"):
        scan_jsonl(tmp_path / "absent.jsonl")


@pytest.mark.parametrize("order", [[0], [0, 0], [0, 2]])
def test_an_order_that_loses_a_record_is_refused(tmp_path: Path, order):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "b"}\n')
    with refused("E-CURATION-ORDER", "permutation"):
        write_records(tmp_path / "out.jsonl", scan_jsonl(path), np.array(order))
    assert not (tmp_path / "out.jsonl").exists()


def test_an_input_that_changed_since_the_scan_leaves_the_old_output(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "b"}\n')
    records = scan_jsonl(path)
    (tmp_path / "out.jsonl").write_bytes(b"old")
    path.write_bytes(b'{"text": "x"}\n{"text": "y"}\n')
    with refused("E-CURATION-INPUT", "changed"):
        write_records(tmp_path / "out.jsonl", records, np.array([1, 0]))
    assert (tmp_path / "out.jsonl").read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_the_output_may_not_be_the_input_nor_be_named_as_compressed(tmp_path: Path):
    with refused("E-CURATION-INPUT", "cannot be compressed"):
        JsonlPaths(tmp_path / "a.jsonl", tmp_path / "b.jsonl.zst", tmp_path).check()
    with refused("E-CURATION-INPUT", "is the input"):
        JsonlPaths(tmp_path / "a.jsonl", tmp_path / "b" / ".." / "a.jsonl", tmp_path).check()


def test_terms_name_what_is_typical_and_not_what_is_everywhere():
    texts = ["the oven and the dough", "dough in the oven", "the comet", "a comet and the lens"] * 5
    labels = np.array([0, 0, 1, 1] * 5)
    found = typical_terms(texts, labels, 3)
    assert found[0][:2] == ["dough", "oven"]
    assert found[1][0] == "comet"
    assert found[2] == []
    assert not any("the" in words for words in found)
