"""Document ids and the MD5 rules are bit-exact and cannot lead out of the data root."""

import hashlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe_core.base.docid import DocId, bucket_of, parse_doc_id, split_of
from nmoe_core.base.errors import FormatError
from nmoe_core.shards.documents import DocumentReader
from tests.refusals import refused

DOC_ID = "web//web/train/shard_0000/web-v1-shard-000000.npy#s=0:e=812"


@pytest.mark.parametrize(
    ("text", "md5", "of_64", "of_1000", "percentile"),
    [  # made with coreutils' md5sum and the arithmetic of a shell
        ("hello", "5d41402abc4b2a76b9719d911017c592", 54, 0x5D41402ABC4B2A76 % 1000, 54),
        ("web:0", "8077159fa35d1e774bd65c8a7560acd1", 55, 87, 67),
        ("web/part.jsonl:41", "d8bd72ce7e04e99a935c18565665da2c", 26, 762, 50),
        ("naïve-雪", "7ab70297fed357895a4b30a4044416b8", 9, 857, 3),
        ("https://example.com/a?b=c#d", "05038cd7c4c2f54fcce27064fff818af", 15, 47, 43),
        ("0", "cfcd208495d565ef66e7dff9f98764da", 47, 583, 16),
        (DOC_ID, "8c6df8872016956ba2d7f32fe83f1474", 43, 907, 87),
        ("a//b#s=1:e=2", "f0015ff214de07f11b4597fe0ddfa703", 49, 993, 38),
    ],
)
def test_golden_vectors_of_both_md5_rules(
    text: str, md5: str, of_64: int, of_1000: int, percentile: int
) -> None:
    assert hashlib.md5(text.encode()).hexdigest() == md5
    assert (bucket_of(text, 64), bucket_of(text, 1000)) == (of_64, of_1000)
    expected = "train" if percentile < 80 else "val" if percentile < 90 else "test"
    assert split_of(text) == expected


_PART = st.text(st.characters(exclude_characters="/#", exclude_categories=["Cs", "Cc"]), min_size=1)
_PART = _PART.filter(lambda part: part not in (".", ".."))


_OFFSET = st.integers(0, 10**18 - 1 - 2**31)  # offsets have 18 digits at most


@given(_PART, st.lists(_PART, min_size=1, max_size=4), _OFFSET, st.integers(1, 2**31))
def test_any_document_id_round_trips(
    source: str, parts: list[str], start: int, length: int
) -> None:
    document = DocId(source, "/".join(parts), start, start + length)
    assert parse_doc_id(str(document)) == document
    assert str(document) == f"{source}//{'/'.join(parts)}#s={start}:e={start + length}"


@given(st.text(st.sampled_from("ab/#s=e:01.\\-"), max_size=30))
def test_any_text_is_the_document_id_it_prints_as_or_is_refused(text: str) -> None:
    with suppress(FormatError):
        document = parse_doc_id(text)
        assert str(document) == text
        assert 0 <= document.start < document.end


@pytest.mark.parametrize(
    "text",
    ["", "web", "web//p", "//p#s=0:e=1", DOC_ID + "x"]
    + [f"web//p#{span}" for span in ("s=1", "s=3:e=3", "s=-1:e=3", f"s=0:e={10**18}")]
    # Other spellings of an id.
    + [f"web//p#{span}" for span in ("s=048:e=812", "s=00:e=1", "s=0:e=٣")]
    + [f"web//{path}#s=0:e=1" for path in ("./p", "p//q", "p/./q", "p/", "p/.")],
)
def test_text_that_is_no_document_id_is_refused(text: str) -> None:
    with refused("E-DOCID"):
        parse_doc_id(text)


def test_a_document_is_read_without_its_eos_and_only_below_the_data_root(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("secret.npy", "data/a.npy"):
        np.save(tmp_path / name, np.asarray([5, 6, 99, 7, 99], np.uint32))
    reader = DocumentReader(tmp_path / "data")
    for rel in ("../secret.npy", "/etc/passwd.npy", "a/../../secret.npy"):
        with refused("E-PATH-ESCAPE"):
            reader.tokens(f"src//{rel}#s=0:e=3")
    assert reader.tokens("s//a.npy#s=0:e=3", eos_token_id=99).tolist() == [5, 6]
    assert reader.tokens("s//a.npy#s=3:e=5").tolist() == [7, 99]
    for wrong, says in (
        ("s//a.npy#s=0:e=2", "EOS token; found 6, expected 99"),
        ("s//a.npy#s=3:e=6", "after the end of its shard; found end 6, expected at most 5"),
    ):
        with refused("E-DOCID", naming=[says]):
            reader.tokens(wrong, eos_token_id=99)
