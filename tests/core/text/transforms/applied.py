"""Transforms applied to texts, as prep applies them."""

from typing import Any

from pydantic import TypeAdapter

from nmoe_core.config.transforms import TransformTable
from nmoe_core.text.normalise import normalize_batch
from nmoe_core.text.transforms.batch import Batch
from nmoe_core.text.transforms.chain import Chain
from nmoe_core.text.transforms.edits import original

_TABLES: TypeAdapter[Any] = TypeAdapter(TransformTable)


def chain_of(kind: str, **keys: Any) -> Chain:
    """A chain of one transform."""
    return Chain([_TABLES.validate_python({"kind": kind, **keys})])


def batch_of(texts: list[str]) -> Batch:
    """Normalised texts, as a batch."""
    normal, payloads = normalize_batch(texts)
    return Batch(normal, payloads, [str(i) for i in range(len(texts))])


def applied(chain: Chain, texts: list[str]) -> list[str]:
    """The texts after a chain: the same in one batch and one by one, and what was changed can be
    undone."""
    batch = batch_of(texts)
    after, payloads, changed = chain.apply(batch)
    assert payloads == [text.encode() for text in after]
    alone = [chain.apply(batch_of([text]))[0][0] for text in texts]
    assert after == alone
    for i, text in enumerate(batch.texts):
        changes = changed[i].changes if i in changed else []
        assert original(after[i], changes) == text
        assert (i in changed) == (after[i] != text)
    return after


def one(chain: Chain, text: str) -> str:
    """One text after a chain."""
    [after] = applied(chain, [text])
    return after
