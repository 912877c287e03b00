"""A file of prompts: JSON lines, read anew each time they are asked for.

A prompt is an object with `text` (a string, tokenised with no special tokens) or `tokens` (a list
of ids), and an `id` of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmoe_core.base.errors import SourceError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.base.jsonl import parse_object, read_lines

if TYPE_CHECKING:
    from nmoe_core.engine import BatchedGenerator
    from nmoe_core.engine.devices import Shard
    from nmoe_core.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Settings:
    """How completions are made; prompt i of the file is sampled with seed `seed + i`."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()

    def request(self, prompt: Prompt) -> Any:
        """The generator's request."""
        from nmoe_core.engine import Request, Sampling

        sampling = Sampling(self.temperature, self.top_p, self.top_k, self.seed + prompt.place)
        return Request(prompt.tokens, self.max_tokens, sampling, frozenset(self.stop_ids))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, with its place in the file."""

    place: int
    prompt_id: str
    tokens: list[int]
    is_text: bool

    @property
    def digest(self) -> str:
        """Name of its tokens."""
        return sha256_json(self.tokens)[:16]


@dataclass(frozen=True)
class Prompts:
    """The prompts of one shard.

    Attributes:
        path: JSON lines.
        shard: The prompts whose place in the file, from 0, is `index` modulo `count`.
        load_tokenizer: Called once, if a prompt is text.
    """

    path: Path
    shard: Shard
    load_tokenizer: Callable[[], Tokenizer]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Loaded with the first use."""
        return self.load_tokenizer()

    def __iter__(self) -> Iterator[Prompt]:
        for line in read_lines(self.path, self._refuse):
            place = line.number - 1
            if place % self.shard.count == self.shard.index:
                yield self._prompt(place, line.payload)

    def require_file(self) -> None:
        """Refuse a file that is missing or, like a pipe, can be read once only.

        Raises:
            SourceError: Not a file (E-SOURCE-MISSING).
        """
        if not self.path.is_file():
            raise SourceError(
                "no file of prompts here",
                where=self.path,
                expected="a file, since it is read twice",
                code="E-SOURCE-MISSING",
            )

    def check(self, generator: BatchedGenerator, settings: Settings) -> None:
        """Refuse prompts that the generator cannot complete.

        Raises:
            SourceError: A line is no prompt, or an id comes twice (E-SOURCE-RECORD).
            ConfigError, TokenizerError: As `BatchedGenerator.check`.
        """
        self.require_file()
        seen: set[str] = set()
        for prompt in self:
            if prompt.prompt_id in seen:
                raise self._bad(prompt.place, f"id {prompt.prompt_id!r} again", "ids used once")
            seen.add(prompt.prompt_id)
            generator.check(settings.request(prompt))

    @property
    def tokenizer_name(self) -> str:
        """Fingerprint of the tokenizer that was used, or `none`."""
        used = self.__dict__.get("tokenizer")
        return "none" if used is None else used.fingerprint

    def _prompt(self, place: int, line: bytes) -> Prompt:
        try:
            row = parse_object(line)
        except ValueError as error:
            raise self._bad(place, f"{error}", "one JSON object") from None
        if not isinstance(row.get("id"), str):
            raise self._bad(place, "no id", "an object with a string as id")
        text, tokens = row.get("text"), row.get("tokens")
        try:
            f"{row['id']}{text}".encode()
        except UnicodeEncodeError:
            raise self._bad(place, "half a surrogate pair", "text that UTF-8 can hold") from None
        if isinstance(text, str) and tokens is None:
            ids = self.tokenizer.encode_batch([text]).ids.tolist()
            return Prompt(place, row["id"], ids, True)
        if text is None and isinstance(tokens, list) and all(type(t) is int for t in tokens):
            return Prompt(place, row["id"], tokens, False)
        raise self._bad(place, "neither or both", "text (a string) or tokens (a list of ids)")

    def _refuse(self, number: int, reason: str) -> SourceError:
        return self._bad(number - 1, reason, "one JSON object")

    def _bad(self, place: int, found: str, expected: str) -> SourceError:
        where = f"{self.path}:{place + 1}"
        return SourceError(
            "not a prompt", where=where, found=found, expected=expected, code="E-SOURCE-RECORD"
        )
