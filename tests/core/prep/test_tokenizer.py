"""Token ids equal tiktoken's, offline, whatever the engine."""

from __future__ import annotations

import functools
import os
import random
import string
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nmoe_core.base.errors import TokenizerError
from nmoe_core.cli import main
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.records import Reading, Record
from nmoe_core.text.normalise import normalize_batch
from nmoe_core.text.tokenizer import Engine, Tokenizer, load_tokenizer
from nmoe_core.text.vocabulary import ensure_vocabulary
from tests.refusals import refused

TEXTS = [
    "",
    "plain words, then code: def f(x): return x\n\n\t# end",
    "<|endoftext|><|start|>assistant<|channel|>final<|message|>",
    "東京 Привет שלום नमस्ते \U0001f9d1\u200d\U0001f680 e\u0301",
    "z" * 5000,
    " ".join(str(n) for n in range(500)),
]


@pytest.fixture(params=["quicktok", "tiktoken", "gigatoken"])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "gigatoken":
        pytest.importorskip("gigatoken")
    return request.param


def _reference(text: str) -> list[int]:
    return tiktoken.get_encoding("o200k_harmony").encode_ordinary(text)


def test_every_engine_gives_the_ids_of_tiktoken(engine: Engine) -> None:
    tokenizer = load_tokenizer(engine=engine)
    ids, offsets = tokenizer.encode_batch(TEXTS)
    assert (ids.dtype, offsets[0], offsets[-1]) == (np.uint32, 0, len(ids))
    for text, start, stop in zip(TEXTS, offsets, offsets[1:]):
        assert ids[start:stop].tolist() == _reference(text)
    assert tokenizer.fingerprint == load_tokenizer().fingerprint
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (201_088, 199_999)


@functools.cache
def _adversary(name: str) -> tuple[str, list[int]]:
    """A long normalised text and its ids."""
    rng = random.Random(5)
    text = {
        "letters": "".join(rng.choices("abcdefghij", k=2**20)),
        "base64": "".join(rng.choices(string.ascii_letters + string.digits + "+/", k=2**19)),
        "blanks": " " * 2**17 + "\n" * 2**17,
        "nul": "a\x00" * 2**17,
        "specials": "<|endoftext|><|start|>assistant<|message|>" * 10_000,
        "surrogates": "\ud800a\udfff \ud83d\ude00" * 50_000,
    }[name]
    (clean,), _ = normalize_batch(["." + text + "."])
    return clean, _reference(clean)


@pytest.mark.parametrize("name", ["letters", "base64", "blanks", "nul", "specials", "surrogates"])
def test_long_adversarial_texts_have_the_ids_of_tiktoken(engine: Engine, name: str) -> None:
    text, expected = _adversary(name)
    if engine == "tiktoken" and name == "letters":
        pytest.skip("it is the reference, and takes long")
    assert load_tokenizer(engine=engine).encode_batch([text]).ids.tolist() == expected


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(max_size=80), max_size=6))
def test_any_text_has_the_ids_of_tiktoken(engine: Engine, texts: list[str]) -> None:
    ids, offsets = load_tokenizer(engine=engine).encode_batch(texts)
    for text, start, stop in zip(texts, offsets, offsets[1:]):
        assert ids[start:stop].tolist() == _reference(text)


def test_an_engine_that_differs_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class OffByOne:
        def encode_batch(self, texts: list[str], threads: int) -> tuple[np.ndarray, np.ndarray]:
            ids = np.array([1, 2, 3] * len(texts), np.uint32)
            return ids, np.arange(0, len(ids) + 1, 3)

    import quicktok

    monkeypatch.setattr(quicktok, "get_encoding", lambda name: OffByOne())
    with refused("E-TOKENIZER-DRIFT"):
        Tokenizer()


def test_a_difference_in_a_batch_stops_prep(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer()
    monkeypatch.setattr(
        tokenizer._reference.__class__, "encode_ordinary", lambda self, text: [1, 2, 3]
    )
    with pytest.raises(TokenizerError, match="does not tokenise as tiktoken"):
        tokenizer.encode_batch(["any text"])


@pytest.mark.parametrize(
    ("name", "engine", "code", "says"),
    [
        ("o200k_harmonic", "quicktok", "E-TOKENIZER-NAME", None),
        ("cl100k_base", "gigatoken", "E-TOKENIZER-ENGINE", None),
        ("gpt2", "quicktok", "E-TOKENIZER-ENGINE", 'engine = "tiktoken"'),
        ("o200k_harmony", "gigatoken", "E-TOKENIZER-ENGINE", r"nmoe-data\[fast\]"),
    ],
)
def test_an_unknown_name_and_an_engine_that_lacks_it_or_is_not_installed_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, engine: Engine, code: str, says: str | None
) -> None:
    if says:
        monkeypatch.setattr(tiktoken, "get_encoding", lambda name: object())
        monkeypatch.setitem(sys.modules, "gigatoken", None)
    with refused(code, says):
        Tokenizer(name, engine)


@pytest.mark.parametrize("name", tiktoken.list_encoding_names())
def test_every_encoding_of_tiktoken_works_offline_or_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for key in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(key, "http://127.0.0.1:9")
    monkeypatch.setenv("NMOE_CACHE_DIR", str(tmp_path / "ours"))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tiktokens"))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    load_tokenizer.cache_clear()
    (tmp_path / "in.jsonl").write_text(
        '{"text": "some text of ten tokens or more, as it must be"}\n'
    )
    source = ["--source", "jsonl", "--paths", str(tmp_path / "in.jsonl"), "--num-shards", "1"]
    place = ["--output", str(tmp_path / "out" / "train"), "--name", "n"]
    status = main(["prep", *source, *place, "--tokenizer", name])
    error = capsys.readouterr().err
    assert os.environ["TIKTOKEN_CACHE_DIR"] == str(tmp_path / "tiktokens")
    if name in ("cl100k_base", "o200k_base", "o200k_harmony"):
        assert status == 0, error
        return
    assert status == 1
    assert error.splitlines()[-1].startswith("ERROR [E-TOKENIZER-VOCABULARY]: ")
    assert name in error
    assert "Traceback" not in error


@pytest.mark.parametrize("name", ["cl100k_base", "o200k_base"])
def test_a_vocabulary_that_quicktok_carries_has_the_bytes_that_tiktoken_pins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("NMOE_CACHE_DIR", str(tmp_path / "ours"))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    (made,) = ensure_vocabulary(name).iterdir()
    # A damaged copy in the user's cache is left alone, and tiktoken reads the whole one.
    (tmp_path / made.name).write_bytes(b"torn")
    tokenizer = Tokenizer(name, "tiktoken")
    assert tokenizer.decode(tokenizer.encode_batch(["Grüße"]).ids) == "Grüße"
    assert (tmp_path / made.name).read_bytes() == b"torn"


def _texts() -> Iterator[list[str]]:
    """The standard library; and all JSON lines below `NMOE_CORPUS_DIR`, also `.gz` and `.zst`."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    yield [path.read_text(encoding="utf-8") for path in files[:: max(1, len(files) // 60)]]
    named = os.environ.get("NMOE_CORPUS_DIR")
    if named:
        files = find_files(["**/*.jsonl*"], Path(named))
        for block in JsonlSource(Reading("corpus"), files).blocks():
            yield [record.text for record in block.records() if isinstance(record, Record)]


def test_real_text_has_the_ids_of_tiktoken() -> None:
    pytest.importorskip("gigatoken")
    num_tokens = 0
    for texts in _texts():
        expected = np.array([i for text in texts for i in _reference(text)], np.uint32)
        num_tokens += len(expected)
        for engine in ("quicktok", "gigatoken"):
            found = load_tokenizer(engine=engine).encode_batch(texts)
            np.testing.assert_array_equal(found.ids, expected, err_msg=engine)
    assert num_tokens > 100_000
