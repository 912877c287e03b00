"""Reads a file of prompts: settings, and the token ids of texts and conversations.

A prompt is an object with a unique `id` and one of `text`, `tokens` (a list of ids) and `messages`
(a conversation, rendered by the checkpoint's chat template, with `tools` and
`chat_template_kwargs`). Its `settings` replace settings of the command. A prompt that cannot be
tokenised is read with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from loader.plan.settings import TOKENIZER_FILES
from nmoe_core.base.errors import ConfigError, SourceError, TokenizerError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.base.jsonl import read_objects
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.base.strict import StrictModel, validate
from nmoe_core.text.chat.template import DEFAULT_DATE, Chat
from nmoe_core.text.models import model_tokenizer
from nmoe_core.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from nmoe_core.engine import Sampling
    from nmoe_core.engine.devices import Shard

_KINDS = ("text", "tokens", "messages")
_KEYS = ("id", *_KINDS, "tools", "chat_template_kwargs", "settings")
_EXPECTED = (
    "one of text (a string), tokens (a list of ids) and messages (a list of objects; with it, "
    "tools is a list of objects, and chat_template_kwargs an object)"
)


class Settings(StrictModel):
    """Settings of completions. Sample k of a prompt, from 0 to n - 1, is drawn with a seed that is
    derived from `seed`, the prompt's id and k. If `stop_ids` is None, the model's EOS ids end a
    completion."""

    max_tokens: Annotated[int, Field(ge=1)] = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    n: Annotated[int, Field(ge=1)] = 1
    stop_ids: tuple[int, ...] | None = None
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    logprobs: bool = False

    def sampling(self, prompt_id: str, sample: int) -> Sampling:
        """How sample `sample` of a prompt is drawn. Raises ConfigError if a value is out of range
        (E-CONFIG-SAMPLING)."""
        from nmoe_core.engine.generation.sampling import Sampling, drawn_seed

        Sampling(self.temperature, self.top_p, self.top_k, self.seed)
        seed = drawn_seed(self.seed, prompt_id, sample)
        return Sampling(self.temperature, self.top_p, self.top_k, seed)

    def check(self, vocab_size: int) -> None:
        """Raise ConfigError if a value is out of range (E-CONFIG-SAMPLING, E-CONFIG-GENERATE)."""
        self.sampling("", 0)
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(
                "n is above 1 at temperature 0, so all samples would be equal",
                found=self.n,
                do="set a temperature above 0",
                code="E-CONFIG-GENERATE",
            )
        for token in self.stop_ids or ():
            if not 0 <= token < vocab_size:
                raise ConfigError(
                    "a stop id is outside the vocabulary",
                    found=token,
                    expected=f"0 to {vocab_size - 1}",
                    code="E-CONFIG-GENERATE",
                )


class Prompt(NamedTuple):
    """A prompt; `tokens` is empty if it cannot be tokenised because of `error`. `spells`: a special
    token that its text or its messages spell, and that was read as ordinary text."""

    line: int
    prompt_id: str
    tokens: list[int]
    settings: Settings
    error: str | None = None
    spells: str | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of the tokens and settings."""
        return sha256_json([self.tokens, self.settings.model_dump(mode="json")])[:16]


@dataclass(frozen=True)
class Prompts:
    """The prompts of one shard of a JSONL file, read again in each iteration. The shard has the
    prompts whose line number, from 0, is `index` modulo `count`.

    `reads_specials`: whether special tokens that texts and messages spell are special tokens;
    texts then also get the tokens that the tokenizer adds, such as BOS. `date`: the date for chat
    templates that write it, in ISO 8601. `end_ids`: the model's EOS ids.
    """

    path: Path
    shard: Shard
    checkpoint: Path
    tokenizer_name: str | None = None
    reads_specials: bool = False
    date: str | None = None
    end_ids: tuple[int, ...] = ()

    @cached_property
    def known_tokenizer(self) -> Tokenizer | None:
        """The given tokenizer, else the checkpoint's, or None."""
        if self.tokenizer_name is not None:
            return load_tokenizer(TokenizerSettings(self.tokenizer_name, needs_eos=False))
        from nmoe_core.engine.weights.weight_files import read_config

        found = model_tokenizer(self.checkpoint, read_config(self.checkpoint).vocab_size)
        return None if found is None else load_tokenizer(found)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError if there is none."""
        if self.known_tokenizer is None:
            raise ConfigError(
                "prompts or stop strings are text, and the checkpoint has no tokenizer",
                where=self.checkpoint,
                expected=" or ".join(TOKENIZER_FILES),
                do="add --tokenizer",
            )
        return self.known_tokenizer

    @cached_property
    def chat(self) -> Chat:
        """The chat template. Raises CheckpointError if there is none (E-CHECKPOINT-TEMPLATE)."""
        now = self.date or DEFAULT_DATE
        return Chat(self.checkpoint, self.tokenizer, now, reads_specials=self.reads_specials)

    def read(self, settings: Settings, vocab_size: int) -> Iterator[Prompt]:
        """The prompts, with these settings unless they have their own.

        Raises SourceError if a line is not a prompt, or has settings that are out of range
        (E-SOURCE-RECORD).
        """
        for line, row in read_objects(self.path, lambda number, why: self._bad(number, why)):
            if (line.number - 1) % self.shard.count == self.shard.index:
                yield self._prompt(line.number, row, settings, vocab_size)

    def require_file(self) -> None:
        """Raise SourceError if the file is missing or, like a pipe, can be read only once
        (E-SOURCE-MISSING)."""
        if not self.path.is_file():
            raise SourceError(
                "the prompts are not a regular file",
                where=self.path,
                expected="a file that can be read twice",
                code="E-SOURCE-MISSING",
            )

    def again(self, line: int, prompt_id: str) -> SourceError:
        """The error for an id that an earlier prompt has."""
        return self._bad(line, f"id {prompt_id!r} again", "unique ids")

    def _prompt(self, line: int, row: dict[str, Any], base: Settings, vocab_size: int) -> Prompt:
        if not isinstance(row.get("id"), str):
            raise self._bad(line, "no id", "an object with a string as id")
        given = {kind: row[kind] for kind in _KINDS if row.get(kind) is not None}
        try:
            json.dumps([row.get(key) for key in _KEYS], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise self._bad(line, "half a surrogate pair", "valid Unicode text") from None
        settings = base
        if row.get("settings") is not None:
            try:
                own = base.model_dump() | row["settings"]
                settings = validate(Settings, own, "settings")
                settings.check(vocab_size)
            except (ConfigError, TypeError) as error:
                raise self._bad(line, str(error), "settings of the command") from None
        if len(given) != 1 or not _is_valid(given, row):
            raise self._bad(line, f"{' and '.join(given) or 'none'}", _EXPECTED)
        spells = None
        if "tokens" not in given and not self.reads_specials:
            match = self.tokenizer.control_tokens.search(json.dumps(given, ensure_ascii=False))
            spells = None if match is None else match[0]
        try:
            return Prompt(line, row["id"], self._ids(given, row), settings, None, spells)
        except TokenizerError as error:
            if error.code not in ("E-TOKENIZER-CHAT", "E-TOKENIZER-TEXT"):
                raise
            return Prompt(line, row["id"], [], settings, str(error), spells)

    def _ids(self, given: dict[str, Any], row: dict[str, Any]) -> list[int]:
        if "tokens" in given:
            return given["tokens"]
        if "messages" in given:
            tools = row.get("tools")
            return self.chat.prompt_ids(given["messages"], tools, row.get("chat_template_kwargs"))
        if self.reads_specials:
            return self.tokenizer.encode_with_specials(given["text"], is_prompt=True)
        return self.tokenizer.encode_batch([given["text"]]).ids.tolist()

    def _bad(self, line: int, found: str, expected: str = "one JSON object") -> SourceError:
        where = f"{self.path}:{line}"
        return SourceError(
            "not a prompt", where=where, found=found, expected=expected, code="E-SOURCE-RECORD"
        )


def _is_valid(given: dict[str, Any], row: dict[str, Any]) -> bool:
    """Whether the values of a prompt have the right types."""
    if "text" in given:
        return isinstance(given["text"], str)
    if "tokens" in given:
        tokens = given["tokens"]
        return isinstance(tokens, list) and all(type(token) is int for token in tokens)
    objects = [given["messages"], [] if row.get("tools") is None else row["tools"]]
    options = row.get("chat_template_kwargs")
    is_valid = all(isinstance(listed, list) for listed in objects) and all(
        isinstance(item, dict) for listed in objects for item in listed
    )
    return is_valid and (options is None or isinstance(options, dict))
