"""Token ids equal tiktoken's, offline, whatever the engine."""

import functools
import math
import os
import random
import string
import sysconfig
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nmoe_core import JSONLSource, PrepConfig, PrepPipeline
from nmoe_core.base.settings import Engine, TokenizerSettings
from nmoe_core.cli import main
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.records import Reading, Record
from nmoe_core.text.normalise import normalize_batch
from nmoe_core.text.reference import TiktokenReference
from nmoe_core.text.tokenizer import Tokenizer, load_tokenizer
from nmoe_core.text.vocabulary import ensure_vocabulary, load_tiktoken
from tests.core.prep.conftest import tree_digest
from tests.project import json_lines
from tests.refusals import refused

TEXTS = [
    "",
    "plain words, then code: def f(x): return x\n\n\t# end",
    "<|endoftext|><|start|>assistant<|channel|>final<|message|>",
    "東京 Привет שלום नमस्ते \U0001f9d1\u200d\U0001f680 e\u0301",
    "z" * 5000,
    " ".join(str(n) for n in range(500)),
]


@pytest.fixture(params=["quicktok", "reference", "gigatoken"])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "gigatoken":
        pytest.importorskip("gigatoken")
    return request.param


def _reference(text: str) -> list[int]:
    return load_tiktoken("o200k_harmony").encode_ordinary(text)


def test_every_engine_gives_the_ids_of_tiktoken(engine: Engine) -> None:
    tokenizer = load_tokenizer(TokenizerSettings(engine=engine))
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
    if engine == "reference" and name == "letters":
        pytest.skip("it is the reference, and takes long")
    assert (
        load_tokenizer(TokenizerSettings(engine=engine)).encode_batch([text]).ids.tolist()
        == expected
    )


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(max_size=80), max_size=6))
def test_any_text_has_the_ids_of_tiktoken(engine: Engine, texts: list[str]) -> None:
    ids, offsets = load_tokenizer(TokenizerSettings(engine=engine)).encode_batch(texts)
    for text, start, stop in zip(texts, offsets, offsets[1:]):
        assert ids[start:stop].tolist() == _reference(text)


@pytest.mark.parametrize("name", ["o200k_harmony", "cl100k_base"])
def test_ids_are_decoded_as_tiktoken_does_without_it_and_without_an_engine(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, rng = load_tiktoken(name), random.Random(0)
    monkeypatch.setenv("NMOE_CACHE_DIR", str(tmp_path))
    first = TiktokenReference(name)
    known = first.spellings()
    assert known == {i: library.decode_single_token_bytes(i) for i in known}
    tokens = [*library.token_byte_values(), *library.special_tokens_set]
    assert known.keys() == set(map(library.encode_single_token, tokens))

    monkeypatch.setattr("nmoe_core.text.reference.load_tiktoken", None)
    monkeypatch.setattr("nmoe_core.text.equivalence.load_engine", None)
    monkeypatch.setattr("nmoe_core.text.tokenizer._fastest", None)
    tokenizer = Tokenizer(TiktokenReference(name), TokenizerSettings(name))
    for length in (0, 1, 2, 3, 50, 2**17 + 7):  # cut inside characters, so not all are UTF-8
        ids = rng.choices(sorted(known), k=length)
        assert tokenizer.decode(ids) == library.decode(ids)
    for unknown in (-1, next(i for i in range(2**20) if i not in known), 2**40):
        with pytest.raises(KeyError, match=str(unknown)):
            tokenizer.decode([5, unknown])


def _engine_that_differs(monkeypatch: pytest.MonkeyPatch, cache: Path, ids: list[int]) -> None:
    """gigatoken gives these ids for every text."""

    class Broken:
        def encode(self, payload: bytes) -> np.ndarray:
            return np.array(ids, np.uint32)

    made = SimpleNamespace(from_tiktoken=lambda *_, **__: Broken())
    monkeypatch.setattr("gigatoken.Tokenizer", made)
    monkeypatch.setenv("NMOE_CACHE_DIR", str(cache))
    monkeypatch.setattr("nmoe_core.text.equivalence.SWEPT", (range(65, 91),))


def test_an_engine_that_differs_is_refused_by_name_and_passed_over_by_auto(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gigatoken")
    _engine_that_differs(monkeypatch, tmp_path, [1, 2, 3])
    with refused("E-TOKENIZER-ENGINE", "its ids differ on"):
        load_tokenizer(TokenizerSettings("o200k_base", "gigatoken"))
    assert load_tokenizer(TokenizerSettings("o200k_base")).engine == "quicktok"


def test_a_difference_that_a_sample_finds_is_an_error_and_prep_starts_again_with_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("gigatoken")
    monkeypatch.setattr("nmoe_core.text.equivalence.prove", lambda name, reference: [])
    monkeypatch.setattr("nmoe_core.text.tokenizer.SAMPLE_SHARE", math.inf)
    _engine_that_differs(monkeypatch, tmp_path, [1, 2, 3])
    chosen = TokenizerSettings("cl100k_base", "gigatoken", eos_token="<|fim_prefix|>")
    tokenizer, texts = load_tokenizer(chosen), ["any text", "and another"]
    with refused("E-TOKENIZER-DRIFT", "its ids differ on 'an"):
        tokenizer.rows(texts)
    expected = load_tiktoken("cl100k_base").encode_ordinary_batch(texts)
    assert [row.tolist() for row in tokenizer.rows(texts)] == expected
    assert tokenizer.engine == "reference"

    def made(engine: Engine, num_documents: int) -> dict[str, str]:
        lines = json_lines({"text": f"text {i} " * 20} for i in range(num_documents))
        (tmp_path / "in.jsonl").write_text(lines)
        config = PrepConfig(
            output_dir=tmp_path / engine,
            dataset_name="web",
            tokenizer="cl100k_base",
            eos_token="<|fim_middle|>",
            engine=engine,
            min_doc_tokens=1,
        )
        manifest = PrepPipeline(JSONLSource(tmp_path / "in.jsonl"), config).run()
        assert manifest.total_documents == num_documents
        return tree_digest(tmp_path / engine)

    with monkeypatch.context() as patch:
        patch.setattr("nmoe_core.text.tokenizer.SAMPLE_SHARE", -1.0)
        assert made("gigatoken", 49) != made("reference", 49)
    assert made("gigatoken", 50) == made("reference", 50)  # nothing of before is taken over
    assert "this pass starts again with the reference" in caplog.text
    monkeypatch.undo()
    monkeypatch.setenv("NMOE_CACHE_DIR", str(tmp_path))
    with refused("E-TOKENIZER-ENGINE", "its ids differ on"):
        load_tokenizer(chosen._replace(bos_token="<|fim_suffix|>"))


@pytest.mark.parametrize(
    ("name", "engine", "code", "says"),
    [
        ("o200k_harmonic", "auto", "E-TOKENIZER-NAME", None),
        ("o200k_harmony", "gigatoken", "E-TOKENIZER-ENGINE", r"nmoe-data\[fast\]"),
    ],
)
def test_an_unknown_name_and_an_engine_that_is_not_installed_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, engine: Engine, code: str, says: str | None
) -> None:
    if says:

        def missing(package: str) -> str:
            raise PackageNotFoundError(package)

        monkeypatch.setattr("nmoe_core.text.engines.version", missing)
    with refused(code, says):
        load_tokenizer(TokenizerSettings(name, engine, needs_eos=False))


@pytest.mark.parametrize("name", tiktoken.list_encoding_names())
def test_every_encoding_of_tiktoken_works_offline_or_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr("nmoe_core.text.equivalence.SWEPT", (range(65, 91),))
    for key in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(key, "http://127.0.0.1:9")
    monkeypatch.setenv("NMOE_CACHE_DIR", str(tmp_path / "ours"))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tiktokens"))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
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
    tokenizer = load_tokenizer(TokenizerSettings(name, "reference", bos_token="<|endofprompt|>"))
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
            found = load_tokenizer(TokenizerSettings(engine=engine)).encode_batch(texts)
            np.testing.assert_array_equal(found.ids, expected, err_msg=engine)
    assert num_tokens > 100_000


def test_a_name_is_that_of_a_file_by_its_spelling_or_by_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("own/llama", "tokenizer.json", "spiece.model"):
        assert TokenizerSettings(name).encoding == "file"
    for make in (lambda: None, Path("own").mkdir):
        make()
        assert TokenizerSettings("own").encoding == "own"
    Path("own/tokenizer.json").touch()
    Path("plain").touch()
    Path("own/llama").mkdir()
    for name in ("own", "plain", "own/llama"):
        assert TokenizerSettings(name).is_file
