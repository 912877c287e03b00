"""Texts that a tokenizer's library gives up on: encoded all the same if that is exact, else bad
records with their place."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken_ext.openai_public import r50k_pat_str

from loader import load_manifest
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.cli import main
from nmoe_core.text.reference import TiktokenReference
from nmoe_core.text.tokenizer import load_tokenizer
from nmoe_core.text.vocabulary import load_tiktoken
from tests.own_tokenizers import HOPELESS, giving_up
from tests.project import json_lines
from tests.refusals import refused

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def _oldest() -> tiktoken.Encoding:
    """An encoding with the pattern of GPT-2, in which line ends are blanks as any other."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {pair: 256 + i for i, pair in enumerate((b"  ", b"\n\n", b"\n ", b"    ", b" a"))}
    return tiktoken.Encoding("t", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})


class _GivesUp:
    """A library that fails on a whole text, as it does on a million blanks."""

    def __init__(self, library: tiktoken.Encoding, text: str) -> None:
        self._library, self._text = library, text
        self._pat_str = library._pat_str
        self._encode_single_piece = library._encode_single_piece

    def encode_to_numpy(self, text: str, **options: Any) -> Any:
        if text == self._text:
            raise ValueError("Max stack size exceeded for backtracking")
        return self._library.encode_to_numpy(text, **options)


_BLANKS = (" ", "  ", "\t", "\n", "\r\n", " \n", "\u00a0", "\u3000", "\u2028", "\x0b")
_OTHERS = ("a", "B", "1", "!", "/", "'s", "\u0301", "東", "\u200b", "_")


@pytest.mark.parametrize("name", ["o200k_harmony", "cl100k_base", "of GPT-2"])
@settings(max_examples=300)
@given(
    parts=st.lists(
        st.lists(st.sampled_from(_BLANKS), min_size=1, max_size=6).map("".join)
        | st.sampled_from(_OTHERS),
        max_size=12,
    )
)
def test_a_text_cut_at_its_blanks_has_the_ids_of_tiktoken(name: str, parts: list[str]) -> None:
    library = _oldest() if name == "of GPT-2" else load_tiktoken(name)
    text = "".join(parts) + "."
    reference = TiktokenReference("o200k_harmony")
    reference.__dict__["library"] = _GivesUp(library, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nmoe_core.text.reference._MANY_BLANKS", 2)
        try:
            found = list(reference.row(text))
        except ValueError:
            assert not re.search(r"[^\S\r\n\x1c-\x1f]{2}\S", text)
            return
    assert found == library.encode(text, disallowed_special=())


def test_a_million_blanks_beside_a_character_that_engines_do_not_know_are_encoded() -> None:
    # The character sends the text to tiktoken, whose expression gives up on the blanks.
    blanks, tokenizer = " " * 1_100_000, load_tokenizer()
    assert tokenizer.engine != "reference"
    found = tokenizer.rows([f"a{blanks}b \u088f", f"a{blanks}b "])
    assert np.array_equal(found[0][: len(found[1]) - 1], found[1][:-1])
    assert tokenizer.decode(found[0]) == f"a{blanks}b \u088f"


def _written(directory: Path, kind: str, texts: list[str]) -> Path:
    """A source of these texts, of any kind; the second is at the place that `_PLACES` says."""
    if kind == "jsonl":
        path = directory / "texts.jsonl"
        path.write_text(json_lines([{"text": text} for text in texts]))
        return path
    if kind == "parquet":
        path = directory / "texts.parquet"
        pq.write_table(pa.table({"text": texts, "n": range(len(texts))}), path)
        return path
    for i, text in enumerate(texts):
        (directory / f"t{i}.txt").write_text(text)
    return directory / "t*.txt"


_PLACES = {"jsonl": r"texts\.jsonl:2", "parquet": r"texts\.parquet: row 1", "files": r"t1\.txt"}


@pytest.mark.parametrize("kind", _PLACES)
def test_a_text_that_the_tokenizer_gives_up_on_is_a_bad_record(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = giving_up(tmp_path)
    path = _written(tmp_path, kind, ["one", HOPELESS, "two", "three " * 9])
    flags = ["--source", kind, "--paths", str(path), "--name", "web", "--tokenizer", str(tokenizer)]
    flags += ["--output", str(tmp_path / "out"), "--num-shards", "2", "--workers", "1"]
    flags += ["--set=prep.engine=reference", "--set=prep.min_doc_tokens=1"]
    flags += ["--set=attributes.columns=n"] if kind == "parquet" else []
    assert main(["prep", *flags]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ERROR")]
    assert len(errors) == 1
    assert re.search(rf"E-SOURCE-RECORD.*{_PLACES[kind]}: .*cannot encode.*retry-limit", errors[0])
    assert main(["prep", *flags, "--on-error", "skip"]) == 0
    manifests = list(map(load_manifest, sorted((tmp_path / "out").glob("shard_*/manifest.json"))))
    assert {one.extra["source_info"]["bad_records"] for one in manifests} == {1}
    assert sum(one.total_documents for one in manifests) == 3
    assert main(["verify", str(tmp_path / "out" / "manifest.json"), "--checksums"]) == 0


def test_such_a_text_has_no_tokens_in_an_estimate(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TokenizerSettings(str(giving_up(tmp_path)), engine="reference"))
    one, two = (len(row) for row in tokenizer.rows(["one", "two words"]))
    assert tokenizer.lengths(["one", HOPELESS, "two words"]).tolist() == [one, 0, two]
    assert tokenizer.lengths([HOPELESS]).tolist() == [0]
    assert tokenizer.lengths([]).tolist() == []


def test_whatever_else_encodes_such_a_text_says_so_in_one_line(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TokenizerSettings(str(giving_up(tmp_path)), engine="reference"))
    says = "begins with 'aaaa.*retry-limit"
    with refused("E-TOKENIZER-TEXT", says):
        tokenizer.rows(["fine", HOPELESS, "fine too"])
    with refused("E-TOKENIZER-TEXT", says):
        tokenizer.encode_long(HOPELESS, 9)
