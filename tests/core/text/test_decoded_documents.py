"""Documents are decoded by a table as the tokenizer's library decodes them one by one."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nmoe_core.text.documents import decode_documents, decode_tokens
from nmoe_core.text.reference import Reference
from nmoe_core.text.tokenizer import Tokenizer, load_tokenizer
from tests.own_tokenizers import byte_level, pieces

TEXTS = [f"document {i} of the corpus, naïve 東京 " * (1 + i % 5) + f"{i * 79}" for i in range(60)]
TEXTS += ["", " ", "  two blanks", "a\tb\nc", "\n\n  x", "🙂", "x "]
PIECES: dict[str, dict[str, Any]] = {
    "pieces": {},
    "blanks": {"remove_extra_whitespaces": False},
    "no prefix": {"add_dummy_prefix": False, "remove_extra_whitespaces": False},
    "no bytes": {"byte_fallback": False, "vocab_size": 120},
    "symbols": {"user_defined_symbols": ["\n\n", "<mask>", "\u2581\u2581"]},
    "unigram": {"model_type": "unigram", "vocab_size": 360, "hard_vocab_limit": False},
}
BLANK = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def converted(directory: Path, *more: dict[str, Any]) -> None:
    """Write the pieces of a model as a `tokenizer.json`, such as Llama 2 and Gemma have."""
    pieces(directory, TEXTS)
    names = list(load_tokenizer(str(directory)).reference.tokens())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    data = {
        "added_tokens": [{"id": i, "content": names[i], "special": True} | flags for i in range(3)],
        "decoder": {
            "type": "Sequence",
            "decoders": [BLANK, {"type": "ByteFallback"}, {"type": "Fuse"}, *more],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "vocab": {name: i for i, name in enumerate(names)},
            "merges": [],
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(data))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')


def of_kind(directory: Path, kind: str) -> Tokenizer:
    if kind == "bytes":
        byte_level(directory, TEXTS)
    elif kind in PIECES:
        pieces(directory, TEXTS, **PIECES[kind])
        (directory / "tokenizer.vocab").unlink()
    else:
        converted(directory, *[STRIP] * (kind == "converted, stripped"))
    return load_tokenizer(str(directory))


def as_library(reference: Reference, rows: Sequence[Sequence[int]]) -> list[str]:
    return [reference.decode(list(row)) for row in rows]


KINDS = ["bytes", *PIECES, "converted", "converted, stripped"]


@pytest.mark.parametrize("kind", KINDS)
def test_any_tokens_decode_as_the_library_decodes_them(tmp_path: Path, kind: str) -> None:
    reference = of_kind(tmp_path, kind).reference
    assert reference.token_bytes is not None
    chance = np.random.default_rng(5)
    most = reference.vocab_size
    rows = [chance.integers(0, n, chance.integers(0, 7)) for n in (300, most) for _ in range(2000)]
    rows = [np.minimum(row, most - 1).astype(np.uint16) for row in rows]
    rows += [np.array([token], np.uint16) for token in range(most)]
    found = decode_tokens(reference, rows).to_pylist()
    assert found == as_library(reference, [row.tolist() for row in rows])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("converted")])
def test_documents_decode_as_the_library_decodes_them(tmp_path: Path, kind: str) -> None:
    tokenizer = of_kind(tmp_path, kind)
    rows = [row.tolist() for row in tokenizer.rows(TEXTS)]
    rows += [row[:-1] for row in rows]  # some end inside a character
    eos = tokenizer.eos_token_id
    tokens = np.array([token for row in rows for token in (*row, eos)], np.uint16)
    ends = np.cumsum([len(row) + 1 for row in rows])
    spans = np.stack([np.append(0, ends[:-1]), ends], axis=1)
    texts = decode_documents(tokenizer, tokens, spans).to_pylist()
    assert texts == as_library(tokenizer.reference, rows)


def test_a_model_that_changes_decoded_texts_is_left_to_the_library(tmp_path: Path) -> None:
    rules = tmp_path / "rules.tsv"
    rules.write_text("65 20 77\t7A\n")  # `e w` becomes `z`
    pieces(tmp_path, TEXTS, denormalization_rule_tsv=str(rules))
    reference = load_tokenizer(str(tmp_path)).reference
    assert reference.token_bytes is None
    row = np.array(reference.row("the words"))
    assert decode_tokens(reference, [row]).to_pylist() == ["thzords"]


def test_a_decoder_that_is_not_known_is_left_to_the_library(tmp_path: Path) -> None:
    converted(tmp_path, {"type": "Strip", "content": "e", "start": 0, "stop": 1})
    reference = load_tokenizer(str(tmp_path)).reference
    assert reference.token_bytes is None
    rows = [np.array([5, 300, 301], np.uint16)]
    assert decode_tokens(reference, rows).to_pylist() == as_library(reference, [rows[0].tolist()])
