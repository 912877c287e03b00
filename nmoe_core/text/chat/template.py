"""A model's chat template: renders messages as transformers does, and tokenises the text.

The template is `chat_template.jinja` beside the tokenizer, else `chat_template` in its
`tokenizer_config.json`; the template `tool_use`, if there is one, renders prompts with tools. It is
rendered in a process with limits (see `process`), at a fixed time. Special tokens that messages
spell are ordinary text, so a message cannot end its turn, unless `reads_specials` is set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from loader.files.regular import read_file
from nmoe_core.base.compute.limited import LimitedProcess
from nmoe_core.base.errors import CheckpointError, TokenizerError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.text.tokenizer import Tokenizer

TEMPLATE_NAME = "chat_template.jinja"
CONFIG_NAME = "tokenizer_config.json"
MAX_MESSAGE_BYTES = 2**22
DEFAULT_DATE = "2000-01-01"
MEMORY_BYTES = 2**29
CPU_S = 2
_ANSWER_S = 120.0  # for a process that gets little processor time
_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# Names of a message's reasoning; transformers gives it to templates by the first two names.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# A code point that is not a character. It separates the parts of a spelled special token.
_APART = "\ufdd0"


class Chat:
    """The chat template of a model and its tokenizer.

    Args:
        checkpoint: The model's directory, for a tokenizer that has no files.
        tokenizer: The model's tokenizer.
        now: The time for templates that write the date, in ISO 8601.
        reads_specials: Whether special tokens that messages spell are special tokens, as
            `apply_chat_template` of transformers reads them by default.

    Raises:
        CheckpointError: There is no chat template beside the tokenizer, or its files are not valid
            (E-CHECKPOINT-TEMPLATE).
    """

    def __init__(
        self, checkpoint: Path, tokenizer: Tokenizer, now: str, *, reads_specials: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.reads_specials = reads_specials
        self._directory = tokenizer.reference.directory or checkpoint
        config = self._read_config()
        self._templates = self._read_templates(config)
        self._variables = {
            f"{name}_token": text
            for name in _TOKENS
            if isinstance(text := _content(config.get(f"{name}_token")), str)
        }
        has_date = any("strftime_now" in template for template in self._templates.values())
        self._now = now if has_date else DEFAULT_DATE

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the templates, their tokens, and the date if a template writes it."""
        return sha256_json([self._templates, self._variables, self._now])

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, up to the start of the assistant's next message.

        Args:
            messages: Messages with `role` and `content`, and the fields that the template reads.
            tools: JSON schemas of functions.
            options: More variables of the template, such as `enable_thinking`.

        Raises:
            TokenizerError: The template refuses the messages, or the conversation is too long
                (E-TOKENIZER-CHAT); or as `Tokenizer.encode_with_specials`.
            CheckpointError: The template is not valid, uses what a template must not, or exceeds
                its limits (E-CHECKPOINT-TEMPLATE).
        """
        return self.encode(self.render(messages, tools, options))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that `render` returned. Raises TokenizerError as
        `Tokenizer.encode_with_specials`."""
        parts = [text] if self.reads_specials else text.split(_APART)
        encode = self.tokenizer.encode_with_specials
        return [token for part in parts for token in encode(part)]

    def as_ordinary_text(self, text: str) -> str:
        """A text for `encode` whose special tokens are read as ordinary text, as those of messages
        are."""
        return self.tokenizer.control_tokens.sub(_broken, text.replace(_APART, ""))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation; U+FDD0 is inside of special tokens that messages spell,
        unless `reads_specials`. Takes the arguments of `prompt_ids`, and raises the same errors."""
        if not messages:
            raise self._refused("there are no messages", "at least one message")
        given = {"messages": [_plain(message) for message in messages], "tools": tools}
        if both := given.keys() & (options or {}).keys():
            raise self._refused(f"{', '.join(sorted(both))} among the options", "other names")
        given = {"documents": None, "add_generation_prompt": True, **(options or {}), **given}
        if not self.reads_specials:
            given = self._apart(given)
        variables = {**self._variables, **given}
        is_with_tools = tools is not None and "tool_use" in self._templates
        asked = json.dumps(["tool_use" if is_with_tools else "default", variables]).encode()
        if len(asked) > MAX_MESSAGE_BYTES:
            found = f"{len(asked):,} bytes of messages"
            raise self._refused(found, f"at most {MAX_MESSAGE_BYTES:,} bytes")
        answer = self._process.ask([asked], _ANSWER_S)
        if not answer:
            del self._process
            limits = f"{CPU_S} s of processor time and {MEMORY_BYTES >> 20} MiB"
            raise self._wrong("it exceeded its limit", limits)
        found = json.loads(answer)
        if "wrong" in found:
            raise self._wrong(found["wrong"][:200])
        if "refused" in found:
            raise self._refused(found["refused"][:200])
        return found["text"]

    @cached_property
    def _process(self) -> LimitedProcess:
        process = LimitedProcess("nmoe_core.text.chat.process")
        limits = {"memory_bytes": MEMORY_BYTES, "cpu_s": CPU_S}
        asked = {"templates": self._templates, "now": self._now, **limits}
        process.tell(json.dumps(asked).encode())
        return process

    def _apart(self, value: Any) -> Any:
        """A copy of a JSON value in which the special tokens of all strings are broken up."""
        if isinstance(value, str):
            return self.as_ordinary_text(value)
        if isinstance(value, Mapping):
            return {key: self._apart(item) for key, item in value.items()}
        return [self._apart(item) for item in value] if isinstance(value, list | tuple) else value

    def _read_config(self) -> dict[str, Any]:
        path = self._directory / CONFIG_NAME
        if not path.is_file():
            return {}
        try:
            value = orjson.loads(read_file(path))
        except ValueError as error:
            raise self._wrong(f"{CONFIG_NAME}: {error}") from None
        return value if isinstance(value, dict) else {}

    def _read_templates(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Templates by name; the one without a name is `default`."""
        path = self._directory / TEMPLATE_NAME
        if path.is_file():
            files = {"default": path}
            for file in sorted((self._directory / "additional_chat_templates").glob("*.jinja")):
                files[file.stem] = file
            return {name: read_file(file).decode() for name, file in files.items()}
        listed = config.get("chat_template")
        if isinstance(listed, str):
            return {"default": listed}
        if isinstance(listed, list):
            listed = {template["name"]: template["template"] for template in listed}
        if not isinstance(listed, dict) or "default" not in listed:
            raise self._wrong("no chat template", f"{TEMPLATE_NAME}, or one in {CONFIG_NAME}")
        return listed

    def _refused(self, found: str, expected: str | None = None) -> TokenizerError:
        return TokenizerError(
            "the chat template refuses these messages",
            found=found,
            expected=expected,
            code="E-TOKENIZER-CHAT",
        )

    def _wrong(self, found: str, expected: str | None = None) -> CheckpointError:
        return CheckpointError(
            "the chat template cannot be used",
            where=self._directory,
            found=found,
            expected=expected,
            do="correct the template, or give prompts as text or tokens",
            code="E-CHECKPOINT-TEMPLATE",
        )


def _content(token: Any) -> Any:
    """The spelling of a token, which is a string or an object with its properties."""
    return token.get("content") if isinstance(token, dict) else token


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as transformers gives it to templates: without null, its reasoning under the names
    that templates read."""
    set_fields = {key: value for key, value in message.items() if value is not None}
    reasoning = next((set_fields[key] for key in _REASONING if key in set_fields), None)
    if reasoning is None:
        return set_fields
    return {"thinking": reasoning, **set_fields, "reasoning_content": reasoning}


def _broken(token: re.Match[str]) -> str:
    return token[0][0] + _APART + token[0][1:]
