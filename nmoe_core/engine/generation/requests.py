"""Requests to a generator, and its results."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nmoe_core.base.errors import ConfigError
from nmoe_core.engine.generation.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how to continue it; `stop_ids` end a sequence and are not part of it."""

    tokens: Sequence[int]
    max_tokens: int = 256
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Completion:
    """The new tokens of request `index`; `stop_id` is the stop token that ended it, if one did."""

    index: int
    tokens: list[int]
    finish_reason: Literal["stop", "length"]
    stop_id: int | None


@dataclass(frozen=True, slots=True)
class GeneratorOptions:
    """Limits of a generator's memory and work.

    Attributes:
        page_size: Positions of a page of the cache.
        num_pages: Pages of the cache; by default enough for `max_batch` sequences of any length.
            With fewer, sequences go back to the queue when pages run out and are computed again.
        max_step_tokens: Prompt tokens of one pass. More fill the pass better; running sequences
            wait longer for it.
        max_prefixes: Shared beginnings kept at once; 0 shares nothing.
        batch_invariant: Make a sequence's logits the same to the last bit in any batch; slower.

    Raises:
        ConfigError: A size is out of range (E-CONFIG-GENERATE).
    """

    page_size: int = 16
    num_pages: int | None = None
    max_step_tokens: int = 512
    max_prefixes: int = 8
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name, least in (("page_size", 1), ("max_step_tokens", 1), ("max_prefixes", 0)):
            check_size(name, getattr(self, name), least)


def check_size(name: str, value: int, least: int) -> None:
    """Refuse a size below the least one (E-CONFIG-GENERATE)."""
    if value < least:
        raise refused(f"{name} is out of range", value, f"at least {least}")


def checked_prompt(tokens: Sequence[int], max_tokens: int | None, max_seq_len: int) -> list[int]:
    """The ids of a prompt that fits, with `max_tokens` new ones or at least one.

    Refuses an empty or too long prompt, and max_tokens below 1 (E-CONFIG-GENERATE).
    """
    prompt = [operator.index(token) for token in tokens]
    new = 1 if max_tokens is None else max_tokens
    if not prompt:
        raise refused("the prompt is empty", 0, "at least one token")
    check_size("max_tokens", new, 1)
    if len(prompt) + new > max_seq_len:
        found = f"{len(prompt)} and {new} tokens"
        expected = f"at most {max_seq_len} (max_seq_len)"
        raise refused("prompt and new tokens do not fit a sequence", found, expected)
    return prompt


def refused(what: str, found: object, expected: str) -> ConfigError:
    """The error for a request or a size that cannot be served."""
    return ConfigError(what, found=found, expected=expected, code="E-CONFIG-GENERATE")
