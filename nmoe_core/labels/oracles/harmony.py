"""Harmony, the prompt format of gpt-oss: renders the oracle's prompt as token ids and reads the
answer.

openai-harmony renders the fixed part once, with a fixed date, so equal settings give equal prompts
on any day. The document is tokenised as plain text and inserted, so it cannot contain a control
token. If a prompt is too long, the end of the document is cut; the rubric and the beginning of the
answer are not cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from nmoe_core.base.errors import ConfigError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.config.rubric import Rubric, code_of
from nmoe_core.labels.oracle import OracleResult
from nmoe_core.labels.scores import QUALITY, Answer, Scale, read_scores
from nmoe_core.text.harmony import (
    ASSISTANT,
    CALL,
    CHANNEL,
    END,
    FINAL,
    FIRST_SPECIAL,
    HARMONY,
    MESSAGE,
    RETURN,
    START,
    encoding,
)
from nmoe_core.text.tokenizer import load_tokenizer

Reasoning = Literal["low", "none"]
# `<|end|>` is not a stop id, because it also ends the reasoning.
STOP_IDS = frozenset({RETURN, CALL})
OPEN_FINAL = (CHANNEL, FINAL, MESSAGE)
TO_FINAL = (END, START, ASSISTANT, *OPEN_FINAL)
# The limit of prompts for servers, which enforce their own limit.
NO_LIMIT = 1 << 30
CONVERSATION_DATE = "2025-06-01"
# Change this version if the lines around a document or the schema of the answer change. It is part
# of the scorer's version, which each label names.
PROMPT_VERSION = "document-between-codes/2"


def fenced(text: str) -> tuple[str, str]:
    """The lines before and after a document in a prompt.

    Both lines hold a code that is derived from the document, so a document cannot contain the line
    that ends it. Every code has the same number of tokens.
    """
    code = code_of(text)
    return f"Text {code}:\n\n", f"\n\nEnd of text {code}. Output the JSON object only."


class JudgePrompt:
    """Prompts of one rubric, at most `max_tokens` long; with reasoning `none` they open the final
    channel.

    Raises ConfigError if the rubric leaves no room for a document (E-CONFIG-CONTEXT).
    """

    stop_ids = STOP_IDS
    to_final = TO_FINAL

    def __init__(self, rubric: Rubric, max_tokens: int, reasoning: Reasoning = "low") -> None:
        ids = _fixed_part(rubric.text())
        # The document is inserted after the `<|message|>` of the empty user message.
        cut = len(ids) - ids[::-1].index(MESSAGE)
        opening = OPEN_FINAL if reasoning == "none" else ()
        self.prefix = ids[:cut]
        self.suffix = [*ids[cut:], *opening]
        self._is_opened = reasoning == "none"
        self._has_reason = rubric.has_reason
        num_fixed = len(self.prefix) + len(self.suffix) + sum(map(len, self._fence("")))
        self.max_document_tokens = require_room(max_tokens, num_fixed)
        prompt_digest = sha256_json([self.prefix, self.suffix])
        self.facts = {"prompt": PROMPT_VERSION, "prompt_tokens_sha256": prompt_digest}

    def prompt(self, text: str) -> tuple[list[int], bool]:
        """The prompt tokens for a document, and whether the end of the document was cut."""
        room = self.max_document_tokens
        # Do not use the library's encoder: it would take minutes for a long run of one character.
        ids = load_tokenizer(HARMONY).encode_long(text, room + 1).tolist()
        head, tail = self._fence(text)
        return [*self.prefix, *head, *ids[:room], *tail, *self.suffix], len(ids) > room

    def decode(self, tokens: list[int]) -> str:
        """The text of a prompt, with its control tokens."""
        return encoding().decode(tokens)

    def _fence(self, text: str) -> list[list[int]]:
        return [encoding().encode(line, disallowed_special=()) for line in fenced(text)]

    def is_reasoning(self, tokens: Sequence[int]) -> bool:
        """Whether an answer that begins with these tokens has not opened the final channel."""
        return not self._is_opened and OPEN_FINAL[:2] not in itertools.pairwise(tokens)

    def read(
        self, tokens: Sequence[int], has_stopped: bool, extract_embedded: bool, scale: Scale
    ) -> OracleResult:
        """Read the result from the tokens of an answer (see `read_answer`)."""
        settings = self._is_opened, extract_embedded, scale, self._has_reason
        return read_answer(tokens, has_stopped, *settings)


def require_room(max_tokens: int, num_fixed: int) -> int:
    """The tokens that a document may have in a prompt of `max_tokens` with `num_fixed` others.
    Raises ConfigError if there are none (E-CONFIG-CONTEXT)."""
    if num_fixed >= max_tokens:
        raise ConfigError(
            "the rubric leaves no room for a document",
            found=f"{num_fixed} tokens of rubric",
            expected=f"less than {max_tokens} (max_ctx - max_new)",
            do="raise max_ctx or lower max_new",
            code="E-CONFIG-CONTEXT",
        )
    return max_tokens - num_fixed


def _fixed_part(instructions: str) -> list[int]:
    """The tokens of the conversation with an empty user message."""
    import openai_harmony as oh

    system = oh.SystemContent.new().with_reasoning_effort(oh.ReasoningEffort.LOW)
    system = system.with_conversation_start_date(CONVERSATION_DATE)
    system = system.with_required_channels(["analysis", "final"])
    developer = oh.DeveloperContent.new().with_instructions(instructions)
    contents = ((oh.Role.SYSTEM, system), (oh.Role.DEVELOPER, developer), (oh.Role.USER, ""))
    messages = [oh.Message.from_role_and_content(*content) for content in contents]
    conversation = oh.Conversation.from_messages(messages)
    return encoding().render_conversation_for_completion(conversation, oh.Role.ASSISTANT)


def read_answer(
    tokens: Sequence[int],
    has_stopped: bool,
    opened: bool = False,
    extract_embedded: bool = False,
    scale: Scale = QUALITY,
    has_reason: bool = False,
) -> OracleResult:
    """Read the result from the tokens of an answer: the scores in the final channel, if the answer
    ends in this channel.

    `tokens` exclude the stop token; `has_stopped` is false if the model reached the token limit
    before a stop token. `opened`: the prompt opened the final channel. `extract_embedded`: also
    accept scores from other places in the answer, and mark them as salvaged. `has_reason`: a reason
    comes before the scores.
    """
    final, last_channel, is_broken = _final_text(tokens, opened)
    is_answer = last_channel == "final" and not is_broken
    reason = "parser_error" if is_broken else "length"
    if has_stopped and not is_broken:
        reason = "final_stop" if is_answer else "stop_outside_final"
    said = Answer()
    if is_answer or extract_embedded:
        said = read_scores(final, extract_embedded, scale, has_reason)
    if extract_embedded and not is_answer:
        if said.scores is None and last_channel in (None, "final"):
            final = _decode(_after_final_marker(tokens))
            said = read_scores(final, extract_embedded, scale, has_reason)
        said = said._replace(is_embedded=said.scores is not None)
    if said.scores is None:
        return OracleResult(None, final or _decode(tokens), reason, len(tokens))
    return OracleResult(said.scores, "", reason, len(tokens), said.is_embedded, reason=said.reason)


def _final_text(tokens: Sequence[int], opened: bool) -> tuple[str, str | None, bool]:
    """The text of the final channel, the last channel, and whether the parser failed."""
    import openai_harmony as oh

    parser = oh.StreamableParser(encoding(), role=oh.Role.ASSISTANT)
    parts: list[str] = []
    try:
        for token in [*(OPEN_FINAL if opened else ()), *tokens]:
            parser.process(token)
            if parser.current_channel == "final" and parser.last_content_delta:
                parts.append(parser.last_content_delta)
    except oh.HarmonyError:
        return "".join(parts), parser.current_channel, True
    channel = parser.current_channel
    if channel is None and parser.messages:
        channel = parser.messages[-1].channel
    return "".join(parts), channel, False


def _after_final_marker(tokens: Sequence[int]) -> list[int]:
    """The tokens after the last header of a final channel; all tokens without such a header."""
    for i in range(len(tokens) - 2, -1, -1):
        if tokens[i] == CHANNEL and tokens[i + 1] == FINAL:
            return list(tokens[i + 2 :])
    return list(tokens)


def _decode(tokens: Sequence[int]) -> str:
    return encoding().decode([token for token in tokens if token < FIRST_SPECIAL])
