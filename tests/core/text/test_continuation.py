"""The text of a completion is what its tokens add to the prompt's text, with any tokenizer."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.text.tokenizer import load_tokenizer
from tests.own_tokenizers import byte_level, pieces
from tests.project import REPOSITORY
from tests.refusals import refused

TEXTS = ["Hello  world, hello!", "def f(x):\n    return  x\n", "naïve café 🐈 日本", "a b c d e"]
LINES = (REPOSITORY / "docs" / "engine.md").read_text("utf-8").splitlines()


@pytest.mark.parametrize("make", [byte_level, pieces, None], ids=["bytes", "pieces", "tiktoken"])
def test_prompt_and_continuation_are_the_whole_text_at_every_split(
    tmp_path: Path, make: Callable[[Path, Sequence[str]], None] | None
) -> None:
    settings = TokenizerSettings(engine="reference", needs_eos=False)
    if make is not None:
        make(tmp_path, TEXTS + LINES)
        settings = settings._replace(name=str(tmp_path))
    tokenizer = load_tokenizer(settings)
    unknown = tokenizer.vocab_size + 7  # of a model with more rows than its tokenizer has tokens
    for text in TEXTS:
        ids = tokenizer.encode_batch([text]).ids.tolist()
        whole = tokenizer.decode(ids)
        for i in range(len(ids) + 1):
            prompt = tokenizer.decode(ids[:i]).rstrip("\ufffd")
            assert prompt + tokenizer.continuation(ids[:i], ids[i:]) == whole
            added = [*ids[i:], unknown]
            assert prompt + tokenizer.continuation([unknown, *ids[:i]], added) == whole


def test_a_sentencepiece_model_does_not_read_special_tokens(tmp_path: Path) -> None:
    pieces(tmp_path, TEXTS + LINES)
    tokenizer = load_tokenizer(TokenizerSettings(str(tmp_path), needs_eos=False))
    with refused("E-TOKENIZER-SPECIAL", "tokenizer.json"):
        tokenizer.encode_with_specials("a</s>")
    assert tokenizer.control_tokens.search("a</s>")


def test_special_tokens_of_an_encoding_are_read_on_request() -> None:
    tokenizer = load_tokenizer(TokenizerSettings("o200k_harmony", engine="reference"))
    text = "<|start|>user<|message|>a<|end|>"
    ids = tokenizer.encode_with_specials(text)
    assert len(ids) == 5
    assert tokenizer.decode(ids) == text
    assert tokenizer.control_tokens.findall(text) == ["<|start|>", "<|message|>", "<|end|>"]
    assert len(tokenizer.encode_batch([text]).ids) > 5
