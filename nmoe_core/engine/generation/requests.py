"""Requests to a generator, and their results."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from nmoe_core.base.errors import ConfigError
from nmoe_core.engine.generation.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how to continue it.

    A token of `stop_ids` ends the sequence and is not part of the result. `is_end`, called with the
    new tokens after each token, may end it too. With `logprobs`, the result has log-probabilities.
    """

    tokens: Sequence[int]
    max_tokens: int = 256
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    stop_ids: frozenset[int] = frozenset()
    is_end: Callable[[list[int]], bool] | None = None
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """The new tokens of request `index`.

    `stop_id` is the stop token that ended the sequence, or None. `logprobs` has the natural
    logarithm of each token's probability under the model, before temperature, top-k and top-p; it
    is empty unless requested.
    """

    index: int
    tokens: list[int]
    finish_reason: Literal["stop", "length"]
    stop_id: int | None
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class GeneratorOptions:
    """Limits of a generator's memory and work.

    Attributes:
        page_size: Positions per page of the cache.
        num_pages: Pages of the cache. Default: enough for `max_batch` sequences of maximum length.
            With fewer pages, sequences return to the queue if pages run out, and are recomputed
            later.
        max_step_tokens: Maximum prompt tokens per pass. More tokens use the device better, but
            running sequences wait longer for a pass.
        max_prefixes: Maximum number of shared prefixes in the cache; 0 disables sharing.
        batch_invariant: Make a sequence's logits bit-identical in any batch; generation is slower.

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
    """Raise ConfigError if a size is below `least` (E-CONFIG-GENERATE)."""
    if value < least:
        raise refused(f"{name} is out of range", value, f"at least {least}")


def checked_prompt(tokens: Sequence[int], max_tokens: int | None, max_seq_len: int) -> list[int]:
    """Check that a prompt and `max_tokens` new tokens (None: at least one) fit into a sequence;
    return the prompt's ids.

    Raises ConfigError if the prompt is empty or too long, or max_tokens is below 1
    (E-CONFIG-GENERATE).
    """
    prompt = [operator.index(token) for token in tokens]
    new = 1 if max_tokens is None else max_tokens
    if not prompt:
        raise refused("the prompt is empty", 0, "at least one token")
    check_size("max_tokens", new, 1)
    if len(prompt) + new > max_seq_len:
        found = f"{len(prompt)} and {new} tokens"
        expected = f"at most {max_seq_len} (max_seq_len)"
        raise refused("prompt and new tokens are too long for a sequence", found, expected)
    return prompt


def refused(what: str, found: object, expected: str) -> ConfigError:
    """The error for a request or size that is out of range."""
    return ConfigError(what, found=found, expected=expected, code="E-CONFIG-GENERATE")
