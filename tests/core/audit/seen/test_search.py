"""The search in tokens against its twin: `str.find` over the decoded texts of all documents."""

import random
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from nmoe_core.audit.seen.answer import checked
from nmoe_core.audit.seen.index_files import Part
from nmoe_core.audit.seen.search import Sentence
from nmoe_core.audit.seen.spellings import Spellings
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.config.tree import Tree
from nmoe_core.shards.documents import ShardFile
from nmoe_core.shards.suffixes import is_in_order, parts, suffix_array
from nmoe_core.text.tokenizer import Tokenizer, load_tokenizer
from tests.refusals import refused

pytest.importorskip("pydivsufsort", reason="extra seen is not installed")
WORDS = {
    "latin": "the cat's naïve café isn't 12345 678 a-b-c re-enter UPPER Title over under is an I'm "
    "e.g. http://a.b/c?d=1 3.14 {x:[1,2]} \n\n \t = ==> __init__ foo_bar l'été Straße",
    "cyrillic": "кошка псевдоним ночи в доме иже вдонимание Ёж",
    "han": "東京 貓 的 一 一一 二 。 ， 之乎者也 不亦說乎",
    "devanagari": "देखें हिन्दी में लेख क्षेत्र",
    "thai_hebrew": "ไทย ภาษาไทย שלום עולם",
    "emoji": "👩\u200d👩\u200d👧 👍🏽 🙂🙂🙂 🇩🇪",
}


def texts_of(script: str, seed: int, count: int = 60) -> list[str]:
    rng, words = random.Random(seed), WORDS[script].split(" ")
    joins = ["", " ", " ", " ", "  ", "\n"]
    made = [
        "".join(rng.choice(words) + rng.choice(joins) for _ in range(rng.randrange(5, 80)))
        for _ in range(count)
    ]
    return [unicodedata.normalize("NFC", text.strip()) for text in made]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("o200k_harmony")


@pytest.fixture(scope="module")
def spellings(tokenizer: Tokenizer) -> Spellings:
    ends = {tokenizer.eos_token_id}
    return Spellings(tokenizer.reference.spellings(), tokenizer.vocab_size, ends)


def part_of(tokens: np.ndarray) -> Part:
    shard = Tree.below(Path()).shard("web", 0)
    file = ShardFile("web", "web/a.npy", tokens, np.empty((0, 2), np.int64), None)
    return Part(shard, file, Path(), 0, tokens.data, suffix_array(tokens).data)


def indexed(tokenizer: Tokenizer, texts: Sequence[str], dtype: str = "<u4") -> Part:
    rows = [np.append(row, tokenizer.eos_token_id) for row in tokenizer.rows(texts)]
    return part_of(np.concatenate(rows).astype(dtype))


def count(texts: Sequence[str], sentence: str) -> int:
    """Occurrences, overlapping ones too."""
    found = 0
    for text in texts:
        at = text.find(sentence)
        while at >= 0:
            found, at = found + 1, text.find(sentence, at + 1)
    return found


@pytest.mark.parametrize("script", WORDS)
def test_every_sentence_cut_out_of_a_text_is_found_as_often_as_it_is_there(
    tokenizer: Tokenizer, spellings: Spellings, script: str
) -> None:
    texts = texts_of(script, seed=1)
    part, rng = indexed(tokenizer, texts), random.Random(2)
    for _ in range(100):
        text, size = rng.choice(texts), rng.choice([2, 4, 7, 15, 40, 120])
        at = rng.randrange(max(1, len(text) - size))
        sentence = text[at : at + size].strip()
        if not sentence:
            continue
        found = Sentence(spellings, sentence.encode()).find(part)
        assert len(found) == count(texts, sentence), sentence
        for start, end in found:
            decoded = tokenizer.decode(np.asarray(part.tokens[start:end]))
            assert sentence in decoded
            assert sentence not in tokenizer.decode(np.asarray(part.tokens[start + 1 : end]))


@pytest.mark.parametrize("script", WORDS)
def test_a_sentence_that_no_text_has_is_not_found(
    tokenizer: Tokenizer, spellings: Spellings, script: str
) -> None:
    texts, others = texts_of(script, seed=1), texts_of(script, seed=99)
    part, rng, looked_for = indexed(tokenizer, texts), random.Random(3), 0
    for _ in range(100):
        text = rng.choice(others)
        at = rng.randrange(max(1, len(text) - 30))
        sentence = text[at : at + 30].strip()
        is_there = count(texts, sentence) > 0
        looked_for += not is_there
        assert bool(len(Sentence(spellings, sentence.encode()).find(part))) is is_there
    assert looked_for > 30


def test_a_sentence_over_the_end_of_a_document_is_not_there(
    tokenizer: Tokenizer, spellings: Spellings
) -> None:
    part = indexed(tokenizer, ["one two three", "four five six"])
    eos = tokenizer.decode([tokenizer.eos_token_id])
    for sentence in ("three four", "threefour", f"three{eos}four", eos):
        assert not len(Sentence(spellings, sentence.encode()).find(part))
    assert len(Sentence(spellings, b"two three").find(part)) == 1


def test_a_text_that_repeats_itself_is_there_at_each_place(
    tokenizer: Tokenizer, spellings: Spellings
) -> None:
    texts = ["a" * 50 + " ha ha ha ha", "=" * 200 + "x", "abababababab"]
    part = indexed(tokenizer, texts)
    for sentence in ("aaaa", "aaaaaaaaaaaaaaaaaaaaa", "ha ha", "=" * 64, "=" * 65, "abab", "x"):
        assert len(Sentence(spellings, sentence.encode()).find(part)) == count(texts, sentence)


def test_a_text_of_common_tokens_is_found_in_large_ranges(
    tokenizer: Tokenizer, spellings: Spellings
) -> None:
    texts = ["type(self).x = type (self.y) ; self)" * 40, "prototype(self) type(self)selfish"] * 300
    part = indexed(tokenizer, texts)
    for sentence in ("type(self)", "self)", "ype(self).x = t", "type(selfi", "otype(self) typ"):
        found = Sentence(spellings, sentence.encode()).find(part)
        assert len(found) == count(texts, sentence)
        assert len(np.unique(found, axis=0)) == len(found)


def test_the_last_suffix_of_a_large_range_is_found(
    tokenizer: Tokenizer, spellings: Spellings
) -> None:
    one, few, last = (int(row[0]) for row in tokenizer.rows([" type", " the", " self"]))
    assert few < last
    tokens = [one, few] * 12_000 + [last] * 30_000 + [one, last, few, tokenizer.eos_token_id]
    found = Sentence(spellings, b" type self").find(part_of(np.array(tokens, "<u4")))
    assert found.tolist() == [[54_000, 54_002]]


@pytest.mark.parametrize(
    ("dtype", "largest"), [("<u2", 2**16 - 1), ("<u4", 2**16), ("<u4", 2**24 - 1)]
)
def test_suffixes_are_in_the_order_of_the_ids_from_their_place_on(dtype: str, largest: int) -> None:
    rng = np.random.default_rng(4)
    for alphabet in (2, 300, largest + 1):
        tokens = rng.integers(0, alphabet, 400).astype(dtype)
        tokens[7] = largest
        found = suffix_array(tokens)
        expected = sorted(range(400), key=lambda at: tokens[at:].tolist())
        assert found.tolist() == expected
        assert is_in_order(tokens, found)
        swapped = found.copy()
        swapped[[10, 11]] = swapped[[11, 10]]
        assert not is_in_order(tokens, swapped)
        assert not is_in_order(tokens, np.where(found == 3, 4, found).astype(np.uint32))


def test_parts_are_whole_documents_and_a_long_one_is_alone() -> None:
    ends = np.array([3, 5, 30, 31, 40])
    spans = np.stack([np.append(0, ends[:-1]), ends], axis=1)
    assert parts(spans, 10) == [(0, 5), (5, 30), (30, 40)]
    assert parts(spans, 1) == [(0, 3), (3, 5), (5, 30), (30, 31), (31, 40)]
    assert parts(spans, 100) == [(0, 40)]
    assert parts(np.empty((0, 2), np.int64), 5) == []


def test_text_that_the_tokens_do_not_spell_is_refused_though_they_decode_to_it(
    tmp_path: Path,
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    ids = {"[UNK]": 0, "play": 1, "##ing": 2, "games": 3, "[SEP]": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.decoder = tokenizers.decoders.WordPiece()
    made.save(str(tmp_path / "tokenizer.json"))
    name = str(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(TokenizerSettings(name, engine="reference", eos_token="[SEP]"))
    assert tokenizer.decode(tokenizer.rows(["playing games"])[0]) == "playing games"
    with refused("E-SEEN-TEXT"):
        checked("playing games", tokenizer)
