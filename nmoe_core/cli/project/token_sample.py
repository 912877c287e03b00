"""Checks a sample of a source of tokens: which tokenizer made it, and where documents end."""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from nmoe_core.base.errors import TokenizerError
from nmoe_core.prep.encoding.texts import Encoder
from nmoe_core.prep.encoding.tokens import given_documents
from nmoe_core.sources.forms.tokens.source import TokensBlock, TokensSource
from nmoe_core.sources.records import Position, RecordColumns
from nmoe_core.text.documents import decode_tokens
from nmoe_core.text.tokenizer import Tokenizer

_MOST_UNITS = 5
_MOST_DOCUMENTS = 100  # of each of them
_MOST_TOKENS = 1000  # of a document
_CUT_TOKENS = 8  # where a text is cut, the last tokens may differ
# Text that a wrong tokenizer decodes often encodes to the same tokens if it is short: up to 43 % of
# documents of 30 tokens did, 5 % of those of 100 tokens, and none of those of 300.
_LEAST_EQUAL = 0.5
_LONG_TOKENS = 100
_LEAST_LONG = 5
_LEAST_ROWS = 8


class TokenSample(NamedTuple):
    """What a sample shows of a source of tokens."""

    num_tokens: int
    """Estimate of all tokens of the source."""
    equal_share: float
    """Share of documents, long ones if there are some, whose text encodes to the same tokens."""
    text: str
    """The text of a document."""
    starts_with_bos: bool
    are_packed: bool
    """Whether documents seem to be rows of one length, in which an EOS ends documents."""


def sample_tokens(source: TokensSource, encoder: Encoder) -> TokenSample:
    """Read the first documents of several files. Raises SourceError as `blocks`, or if an id is not
    in the vocabulary (E-SOURCE-TOKENS)."""
    tokenizer = encoder.tokenizer
    rows: list[np.ndarray] = []
    num_tokens = size_bytes = 0
    for block in _first_blocks(source):
        records = RecordColumns.of(islice(block.records(), _MOST_DOCUMENTS))
        rows += records.tokens
        num_tokens += int(block.run.lengths.sum())
        size_bytes += block.size_bytes
        given_documents(encoder, block, records, range(len(records.rows)))
    documents = [row[row != tokenizer.eos_token_id] for row in rows if len(row)]
    bos = tokenizer.reference.own.get("bos")
    has_bos = [len(one) > 0 and one[0] == bos for one in documents]
    starts_with_bos = sum(has_bos) > 0.9 * len(has_bos)
    documents = [one[1:] if is_bos else one for one, is_bos in zip(documents, has_bos)]
    documents = [one[:_MOST_TOKENS] for one in documents if len(one)]
    are_long = [one for one in documents if len(one) >= _LONG_TOKENS]
    documents = are_long if len(are_long) >= _LEAST_LONG else documents
    texts = decode_tokens(tokenizer.reference, documents).to_pylist()
    equal = [_is_equal(tokenizer, *pair) for pair in zip(texts, documents)]
    return TokenSample(
        round(num_tokens * source.size_bytes() / max(size_bytes, 1)),
        float(np.mean(equal)) if equal else 0.0,
        max(texts, key=len, default="")[:200],
        starts_with_bos,
        _are_packed(rows, tokenizer.eos_token_id),
    )


def require_same(sample: TokenSample, tokenizer: Tokenizer) -> None:
    """Raise TokenizerError if the sample was made by another tokenizer (E-TOKENIZER-OTHER)."""
    if sample.equal_share < _LEAST_EQUAL:
        raise TokenizerError(
            "the tokens do not seem to be of this tokenizer",
            where=tokenizer.name,
            found=f"texts such as {sample.text[:60]!r}; {sample.equal_share:.0%} of the sampled "
            "documents encode to the same tokens again".replace("%", " %"),
            expected="most of them",
            do="name the tokenizer that made the files; if the text is right, add --unchecked",
            code="E-TOKENIZER-OTHER",
        )


def _first_blocks(source: TokensSource) -> Iterator[TokensBlock]:
    step = max(1, len(source.units) // _MOST_UNITS)
    for number in range(0, len(source.units), step):
        yield from islice(source.unit_blocks(Position(number)), 1)


def _is_equal(tokenizer: Tokenizer, text: str, tokens: np.ndarray) -> bool:
    """Whether a text encodes to these tokens, apart from the last few."""
    found = tokenizer.encode_batch([text]).ids
    count = len(tokens) - _CUT_TOKENS if len(tokens) > 2 * _CUT_TOKENS else len(tokens)
    return np.array_equal(found[:count], tokens[:count])


def _are_packed(rows: list[np.ndarray], eos: int) -> bool:
    lengths = {len(row) for row in rows}
    if len(rows) < _LEAST_ROWS or len(lengths) > 1 or not any((row == eos).any() for row in rows):
        return False
    return sum(row[-1] == eos for row in rows) < len(rows) / 2
