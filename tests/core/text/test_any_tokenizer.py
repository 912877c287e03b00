"""Any tokenizer gives the ids of the library that defines it, through whatever engine is chosen."""

import io
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.text.equivalence import probe_texts
from nmoe_core.text.normalise import normalize_batch
from nmoe_core.text.tokenizer import Tokenizer, load_tokenizer
from nmoe_core.text.vocabulary import load_tiktoken
from tests.refusals import refused

tokenizers = pytest.importorskip("tokenizers")
sentencepiece = pytest.importorskip("sentencepiece")
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN3 = _WORDS + r"\p{N}{1,3}" + _REST, _WORDS + r"\p{N}" + _REST
SPECIALS = ["<s>", "</s>", "[UNK]"]
# Engine and, of long texts, whether they are cut: what is expected of each kind.
FORMS = {
    "byte-level": ("gigatoken", True),
    "byte-level with a leading blank": ("gigatoken", True),
    "digits apart": ("reference", True),
    "llama3-like": ("gigatoken", True),
    "qwen3-like": ("gigatoken", True),
    "wordpiece": ("reference", True),
    "unigram": ("reference", False),
    "sentencepiece bpe": ("gigatoken", True),
    "sentencepiece bpe nmt_nfkc": ("reference", True),
    "sentencepiece unigram": ("reference", False),
    "cl100k_base": ("gigatoken", True),
    "o200k_base": ("gigatoken", True),
}


@cache
def corpus() -> list[str]:
    """Code, and prose of several scripts."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    code = [path.read_text(encoding="utf-8")[:4000] for path in files[::8]]
    prose = [
        "The quick brown fox. ",
        "東京の人、と。",
        "Привет, мир! ",
        "naïve café ",
        "한국어 말. ",
    ]
    return [*code, *(text * 20 for text in prose)]


def _json(form: str) -> Any:
    pre, models = tokenizers.pre_tokenizers, tokenizers.models
    trainers, settings = tokenizers.trainers, {"vocab_size": 1500, "show_progress": False}
    if form == "wordpiece":
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = tokenizers.normalizers.BertNormalizer()
        made.pre_tokenizer, trainer = pre.BertPreTokenizer(), trainers.WordPieceTrainer
    elif form == "unigram":
        made = tokenizers.Tokenizer(models.Unigram())
        made.pre_tokenizer, trainer = pre.Metaspace(), trainers.UnigramTrainer
        settings["unk_token"] = "[UNK]"
    else:
        made = tokenizers.Tokenizer(models.BPE())
        pattern = {"llama3-like": LLAMA3, "qwen3-like": QWEN3}.get(form)
        plain = pre.ByteLevel(add_prefix_space="leading" in form, use_regex=pattern is None)
        made.pre_tokenizer, trainer = plain, trainers.BpeTrainer
        settings["initial_alphabet"] = pre.ByteLevel.alphabet()
        if pattern is not None:
            split = pre.Split(tokenizers.Regex(pattern), "isolated")
            made.pre_tokenizer = pre.Sequence([split, plain])
        if form == "qwen3-like":
            made.normalizer = tokenizers.normalizers.NFC()
        if form == "digits apart":
            made.normalizer = tokenizers.normalizers.NFKC()
            made.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), plain])
        made.decoder = tokenizers.decoders.ByteLevel()
    made.train_from_iterator(corpus(), trainer(special_tokens=SPECIALS, **settings))
    return made


def _pieces(form: str) -> bytes:
    lines = [line for text in corpus() for line in text.splitlines() if line.strip()]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe" if "bpe" in form else "unigram",
        normalization_rule_name="nmt_nfkc" if "nmt" in form else "identity",
        vocab_size=1500,
        byte_fallback=True,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The name of each form's tokenizer. Few code points are swept: all would take seconds."""
    root = tmp_path_factory.mktemp("tokenizers")
    names = {}
    for form in FORMS:
        if form.endswith("_base"):
            names[form] = form
            continue
        directory = root / form.replace(" ", "-")
        directory.mkdir()
        if form.startswith("sentencepiece"):
            names[form] = str(directory / "tokenizer.model")
            Path(names[form]).write_bytes(_pieces(form))
        else:
            names[form] = str(directory / "tokenizer.json")
            _json(form).save(names[form])
            config = json.dumps({"eos_token": {"content": "</s>"}, "bos_token": "<s>"})
            (directory / "tokenizer_config.json").write_text(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NMOE_CACHE_DIR", str(root / "cache"))
        patch.setattr(
            "nmoe_core.text.equivalence.SWEPT", (range(0x860, 0x8A0), range(0x1F600, 0x1F640))
        )
        yield names


@cache
def adversarial() -> list[str]:
    """3,000 texts: of many scripts, blanks and signs, among them names of special tokens."""
    rng = random.Random(3)
    letters = "ab zAZ019 \t\n'’.,;!?/-_\"()~éßÉΩяЯ一龥あんアン가힣ー、。，٣ʰǅ▁Ġ"
    letters += "\u0301\u094d\u00a0\u3000\u200d\U0001f468"
    made = ["".join(rng.choices(letters, k=rng.randrange(1, 60))) for _ in range(1400)]
    made += probe_texts([*SPECIALS, "<|endoftext|>", "\u088f\u0301"], 1600 - 40)
    texts, _ = normalize_batch(made)
    return texts


def reference_rows(form: str, name: str, texts: list[str]) -> list[list[int]]:
    """Ids by the library itself; a text that spells a special token is ordinary text."""
    if form.endswith("_base"):
        return load_tiktoken(name).encode_ordinary_batch(texts)
    if form.startswith("sentencepiece"):
        return sentencepiece.SentencePieceProcessor(model_file=name).encode(texts, out_type=int)
    own = tokenizers.Tokenizer.from_file(name)
    own.encode_special_tokens = True
    return [own.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.mark.parametrize("form", FORMS)
def test_ids_are_those_of_the_library_that_defines_the_tokenizer(
    files: dict[str, str], form: str
) -> None:
    pytest.importorskip("gigatoken")
    tokenizer = load_tokenizer(files[form])
    assert tokenizer.engine == FORMS[form][0]
    texts = [*corpus(), *adversarial()]
    if form == "unigram":  # which reads the names of its special tokens in a text as any other
        texts = [text for text in texts if not any(name in text for name in SPECIALS)]
    expected = reference_rows(form, files[form], texts)
    for text, found, ids in zip(texts, tokenizer.rows(texts), expected):
        assert found.tolist() == list(ids), text
    assert tokenizer.vocab_size > max(map(max, filter(None, expected)))


@pytest.mark.parametrize("form", ["llama3-like", "qwen3-like", "cl100k_base"])
def test_quicktok_takes_merges_that_go_by_ids(files: dict[str, str], form: str) -> None:
    tokenizer = load_tokenizer(TokenizerSettings(files[form], "quicktok"))
    texts = [*corpus(), *adversarial()]
    expected = reference_rows(form, files[form], texts)
    assert [row.tolist() for row in tokenizer.rows(texts)] == expected


@pytest.mark.parametrize(
    ("form", "engine"),
    [*((form, "auto") for form in FORMS), *(("o200k_base", e) for e in ("quicktok", "reference"))],
)
def test_pieces_of_a_long_text_have_the_ids_of_the_whole(
    files: dict[str, str], form: str, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(TokenizerSettings(files[form], engine))
    asked: list[int] = []
    encode = Tokenizer.encode_batch

    def counted(self: Tokenizer, texts: list[str], payloads: Any = None) -> Any:
        asked.append(len(texts))
        return encode(self, texts, payloads)

    text = "  ".join(corpus())
    whole = tokenizer.encode_batch([text]).ids
    monkeypatch.setattr("nmoe_core.text.tokenizer.PIECE_CHARS", 100)
    monkeypatch.setattr(Tokenizer, "encode_batch", counted)
    np.testing.assert_array_equal(tokenizer.encode_long(text, 10**9), whole)
    np.testing.assert_array_equal(tokenizer.encode_long(text, 77), whole[:77])
    assert (len(asked) > 100) == FORMS[form][1]


@pytest.mark.parametrize("form", ["byte-level", "unigram", "sentencepiece bpe"])
def test_text_cannot_spell_the_eos(files: dict[str, str], form: str) -> None:
    tokenizer = load_tokenizer(TokenizerSettings(files[form], bos_token="auto"))
    text = "one </s> two<s></s>"
    ids = tokenizer.encode_batch([text]).ids
    assert not {tokenizer.eos_token_id, tokenizer.bos_token_id} & set(ids.tolist())
    with_bos = np.concatenate([[tokenizer.bos_token_id], ids])
    assert tokenizer.decode(with_bos) == tokenizer.decode(ids)


def test_code_points_that_an_engine_knows_otherwise_are_for_the_reference(
    files: dict[str, str],
) -> None:
    pytest.importorskip("gigatoken")
    text = "x \u088f's 1\u088f2345"  # which Unicode 14 did not have
    for form in ("llama3-like", "o200k_base"):
        found = load_tokenizer(files[form]).encode_batch(["plain", text]).ids.tolist()
        expected = reference_rows(form, files[form], ["plain", text])
        assert found == [*expected[0], *expected[1]]


def test_a_directory_and_a_repository_are_the_tokenizer_in_them(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(files["llama3-like"])
    own = load_tokenizer(str(path))
    assert load_tokenizer(str(path.parent)).name == own.name == f"tokenizer-{own.fingerprint[:16]}"
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(path.parent))
    assert load_tokenizer("org/name").fingerprint == own.fingerprint


def test_the_fingerprint_is_of_what_decides_the_ids(files: dict[str, str], tmp_path: Path) -> None:
    before = load_tokenizer(files["byte-level"]).fingerprint
    data = json.loads(Path(files["byte-level"]).read_bytes())
    merges = [" ".join(merge) for merge in data["model"]["merges"]]  # as older files write them
    same = data | {"decoder": None, "truncation": None, "model": data["model"] | {"merges": merges}}
    other = data | {"normalizer": {"type": "NFC"}}
    found = []
    for number, content in enumerate((same, other)):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(content, indent=1))
        found.append(load_tokenizer(TokenizerSettings(str(path), eos_token="</s>")).fingerprint)
    assert found[0] == before != found[1]


@pytest.mark.parametrize(
    ("config", "settings", "code", "says"),
    [
        ({}, {}, "E-TOKENIZER-SPECIAL", "EOS token is unknown"),
        ({"eos_token": "<|im_end|>"}, {}, "E-TOKENIZER-SPECIAL", "EOS token is unknown"),
        ({}, {"eos_token": "<eos>"}, "E-TOKENIZER-SPECIAL", "found <eos>"),
        ({}, {"eos_token": 10**6}, "E-TOKENIZER-SPECIAL", "below 1501"),
        ({}, {"eos_token": "a"}, "E-TOKENIZER-SPECIAL", "ordinary text can contain the EOS"),
        ({}, {"eos_token": 1, "bos_token": 1}, "E-TOKENIZER-SPECIAL", "same token"),
        ({"eos_token": "</s>"}, {"bos_token": "auto"}, "E-TOKENIZER-SPECIAL", "BOS token"),
        ({"eos_token": "</s>"}, {"engine": "quicktok"}, "E-TOKENIZER-ENGINE", "unrecognized"),
        ("[", {}, "E-TOKENIZER-FILE", "tokenizer_config.json"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused(
    files: dict[str, str], tmp_path: Path, config: Any, settings: Any, code: str, says: str
) -> None:
    made = tokenizers.Tokenizer.from_file(files["byte-level"])
    made.add_special_tokens(["<|im_end|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with refused(code, says):
        load_tokenizer(TokenizerSettings(str(tmp_path), **settings))


@pytest.mark.parametrize("name", ["missing.json", "org/missing.model", "torn.model", "torn.json"])
def test_a_file_that_is_missing_or_torn_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for torn in ("torn.model", "torn.json"):
        Path(torn).write_text('{"model": ')
    with refused("E-TOKENIZER-FILE", name):
        load_tokenizer(name)


@pytest.mark.parametrize(
    ("piece", "other"), [(b"<0x1A>", b"<0\xf11A>"), (b"<unk>", b"<\xf1nk>"), (b"</s>", b"<\xf1s>")]
)
def test_a_piece_that_is_no_text_is_refused(
    files: dict[str, str], tmp_path: Path, piece: bytes, other: bytes
) -> None:
    payload = Path(files["sentencepiece bpe"]).read_bytes()
    damaged = payload.replace(piece, other)
    assert damaged != payload
    (tmp_path / "a.model").write_bytes(damaged)
    with refused("E-TOKENIZER-FILE", "a.model"):
        load_tokenizer(TokenizerSettings(str(tmp_path / "a.model")))


@pytest.mark.parametrize("prefix", ["longer than any token is", "\0", "\u2581"])
def test_a_prefix_that_merges_do_not_have_is_refused(
    files: dict[str, str], tmp_path: Path, prefix: str
) -> None:
    made = json.loads(Path(files["byte-level"]).read_bytes())
    made["model"]["continuing_subword_prefix"] = prefix
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    with refused("E-TOKENIZER-FILE", "does not start with"):
        load_tokenizer(TokenizerSettings(str(tmp_path), eos_token="</s>"))


def test_a_file_whose_ids_are_random_is_refused(files: dict[str, str], tmp_path: Path) -> None:
    made = tokenizers.Tokenizer.from_file(files["byte-level"])
    made.model.dropout = 0.5
    made.save(str(tmp_path / "tokenizer.json"))
    with refused("E-TOKENIZER-FILE", "dropout"):
        load_tokenizer(TokenizerSettings(str(tmp_path), eos_token="</s>"))
    made.model.dropout = None
    made.save(str(tmp_path / "tokenizer.json"))
    load_tokenizer(TokenizerSettings(str(tmp_path), eos_token="</s>"))


def test_a_normalizer_that_multiplies_texts_is_refused(
    files: dict[str, str], tmp_path: Path
) -> None:
    """Eight of these would make a gigabyte of one character."""
    replace = tokenizers.normalizers.Replace
    made = tokenizers.Tokenizer.from_file(files["byte-level"])
    for count, pattern in ((8, "a"), (2, tokenizers.Regex("[ab]"))):
        made.normalizer = tokenizers.normalizers.Sequence([replace(pattern, "a" * 16)] * count)
        made.save(str(tmp_path / "tokenizer.json"))
        with refused("E-TOKENIZER-FILE", "times as long"):
            load_tokenizer(TokenizerSettings(str(tmp_path), eos_token="</s>"))
    made.normalizer = tokenizers.normalizers.Sequence([replace("ab", "a" * 16)] * 2)
    made.save(str(tmp_path / "tokenizer.json"))
    load_tokenizer(TokenizerSettings(str(tmp_path), eos_token="</s>"))


def test_a_prefix_of_all_that_continue_a_word_is_taken(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.BPE(continuing_subword_prefix="##"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=60, continuing_subword_prefix="##", special_tokens=["</s>"], show_progress=False
    )
    made.train_from_iterator(["low lower lowest new newer newest"] * 9, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    read = load_tokenizer(TokenizerSettings(str(tmp_path), eos_token="</s>", engine="reference"))
    assert read.rows(["newest low"])[0].tolist() == made.encode("newest low").ids


def test_a_file_over_which_the_library_panics_is_refused(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        """What Rust code raises."""

    def panic(_: str) -> None:
        raise PanicException("range end index out of range")

    class Library:
        Tokenizer = SimpleNamespace(from_str=panic)

    monkeypatch.setitem(sys.modules, "tokenizers", Library)
    settings = TokenizerSettings(files["byte-level"], eos_token="</s>", engine="reference")
    with refused("E-TOKENIZER-FILE", "range end index"):
        load_tokenizer(settings).rows(["a b"])


@pytest.mark.parametrize("merge", [["a"], 3, None])
def test_a_merge_that_is_no_pair_is_refused(
    files: dict[str, str], tmp_path: Path, merge: object
) -> None:
    made = json.loads(Path(files["byte-level"]).read_bytes())
    made["model"]["merges"] = 3 if merge is None else ["a b", merge]
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    with refused("E-TOKENIZER-FILE", str(tmp_path)):
        load_tokenizer(TokenizerSettings(str(tmp_path), eos_token="</s>")).rows(["a b"])


def test_gigatoken_is_not_used_for_a_tokenizer_with_a_single_word_token(
    files: dict[str, str], tmp_path: Path
) -> None:
    made = tokenizers.Tokenizer.from_file(files["byte-level"])
    made.add_tokens([tokenizers.AddedToken("kilo", single_word=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(TokenizerSettings(str(tmp_path), eos_token="</s>"))
    assert tokenizer.engine == "reference"
    assert 1500 in tokenizer.encode_batch(["a kilo"]).ids
    assert 1500 not in tokenizer.encode_batch(["kilos"]).ids


@pytest.mark.parametrize("place", ["vocab", "added_tokens"])
def test_ids_far_above_the_others_are_not_for_an_engine_which_would_take_memory_for_all_between(
    files: dict[str, str], tmp_path: Path, place: str
) -> None:
    path, far = tmp_path / "tokenizer.json", 2**22
    made = json.loads(Path(files["byte-level"]).read_bytes())
    if place == "vocab":
        made["model"]["vocab"]["far"] = far
    else:
        made["added_tokens"].append(made["added_tokens"][0] | {"id": far, "content": "far"})
    path.write_text(json.dumps(made))
    tokenizer = load_tokenizer(TokenizerSettings(str(tmp_path), eos_token="</s>"))
    assert (tokenizer.engine, tokenizer.vocab_size) == ("reference", far + 1)
