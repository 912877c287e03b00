"""The two forms of OpenAI's protocol that a judge can be asked in: chat, and plain completions.

Chat leaves the rendering of the prompt to the server. Completions get the prompt that `harmony`
renders, spelled out as text, for servers of gpt-oss that have no chat: vLLM, SGLang and
llama-server read its special tokens; Ollama puts a template of its own around it, so it wants chat.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.config.rubric import Rubric
from nmoe_core.labels.oracle import RETRY_TEMPERATURE, OracleResult, Question
from nmoe_core.labels.oracles.answers import read_scores
from nmoe_core.labels.oracles.prompt import (
    DOCUMENT_HEAD,
    DOCUMENT_TAIL,
    answer_schema,
    without_control_spelling,
)

if TYPE_CHECKING:
    from nmoe_core.config.quality import HttpOracleTable

OPEN_FINAL = "<|channel|>final<|message|>"
# One Harmony message: its channel, and a text in which no control token is spelled.
_MESSAGE = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>(?P<channel>[a-z]+)(?: to=[^\s<]+)?"
    r"(?: ?<\|constrain\|>json)?<\|message\|>(?P<text>[^<]*(?:<(?!\|)[^<]*)*)"
)
_BETWEEN, _ENDS = "<|end|>", ("", "<|end|>", "<|return|>", "<|call|>")


class Dialect(Protocol):
    """How to ask a server, and how to read what it says."""

    path: str
    facts: dict[str, Any]

    def payload(self, question: Question) -> bytes:
        """The request's body."""
        ...

    def read_reply(self, value: dict[str, Any]) -> OracleResult:
        """The result of a reply's JSON object."""
        ...


def dialect_of(table: HttpOracleTable, rubric: Rubric, salvage: bool) -> Dialect:
    """The form that `table.api` names; `salvage` also takes scores among other words, marked.

    Raises:
        TokenizerError: Completions need openai-harmony, and it is not installed.
    """
    chosen = ChatDialect if table.api == "chat" else CompletionsDialect
    return chosen(table, rubric, salvage)


class ChatDialect:
    """`/chat/completions`: rubric and document as messages, the JSON schema asked for."""

    path = "chat/completions"

    def __init__(self, table: HttpOracleTable, rubric: Rubric, salvage: bool) -> None:
        self.facts: dict[str, Any] = {}
        self._table, self._salvage = table, salvage
        self._system = orjson.Fragment(orjson.dumps({"role": "system", "content": rubric.text()}))
        self._schema = _response_format()

    def payload(self, question: Question) -> bytes:
        """The request's body."""
        document = without_control_spelling(question.text)
        value = _settings(self._table, question) | {
            "messages": [
                self._system,
                {"role": "user", "content": f"{DOCUMENT_HEAD}{document}{DOCUMENT_TAIL}"},
            ],
            "response_format": self._schema,
        }
        if self._table.reasoning_effort is not None:
            value["reasoning_effort"] = self._table.reasoning_effort
        return orjson.dumps(value)

    def read_reply(self, value: dict[str, Any]) -> OracleResult:
        """The result of a chat completion; only the final content can hold scores.

        Reasons of a failure: `empty_content`, `reasoning_only`, `parse_failed`, or the server's own
        finish reason where it is not `stop` (`length`, `content_filter`).
        """
        try:
            choice = value["choices"][0]
            message, reason = choice["message"], choice.get("finish_reason")
            content = message.get("content")
            thoughts = message.get("reasoning_content") or message.get("reasoning")
        except (KeyError, IndexError, TypeError, AttributeError):
            return _not_a_completion(value)
        return _result(value, content, thoughts, reason, self._salvage)


class CompletionsDialect:
    """`/completions`: the Harmony prompt as text, the stop tokens named, special tokens shown.

    With reasoning `none` the prompt opens the final channel, so the answer is the object alone and
    its schema can be asked for; a schema would keep a model that reasons from doing so.
    """

    path = "completions"

    def __init__(self, table: HttpOracleTable, rubric: Rubric, salvage: bool) -> None:
        from nmoe_core.labels.oracles.harmony import NO_LIMIT, STOP_IDS, JudgePrompt, encoding

        self._table, self._salvage = table, salvage
        self._is_opened = table.reasoning_effort == "none"
        reasoning = "none" if self._is_opened else "low"
        prompt = JudgePrompt(rubric, NO_LIMIT, reasoning)
        self._head, self._tail = (encoding().decode(ids) for ids in (prompt.prefix, prompt.suffix))
        self._fixed: dict[str, Any] = {
            "stop_token_ids": sorted(STOP_IDS),
            "skip_special_tokens": False,
        }
        if self._is_opened:
            self._fixed["response_format"] = _response_format()
        digest = sha256_json([self._head, self._tail, self._fixed["stop_token_ids"]])
        self.facts: dict[str, Any] = {"api": "completions", "prompt_sha256": digest}

    def payload(self, question: Question) -> bytes:
        """The request's body."""
        document = without_control_spelling(question.text)
        prompt = {"prompt": f"{self._head}{document}{self._tail}"}
        return orjson.dumps(_settings(self._table, question) | self._fixed | prompt)

    def read_reply(self, value: dict[str, Any]) -> OracleResult:
        """The result of a completion; reasons of a failure are those of a chat."""
        try:
            choice = value["choices"][0]
            text, reason = choice["text"], choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError):
            return _not_a_completion(value)
        if not isinstance(text, str):
            return _result(value, None, None, reason, self._salvage)
        final = final_text(OPEN_FINAL + text if self._is_opened else text)
        if final is None and self._salvage and "final" in text:
            result = _result(value, text.rpartition("final")[2], text, reason, True)
            return replace(result, is_salvaged=result.scores is not None)
        return _result(value, final, text, reason, self._salvage)


def final_text(text: str) -> str | None:
    """The text of the final channel, where the whole answer is Harmony and ends in that channel.

    A final channel that is only spelled inside another message is a quotation, so an answer whose
    control tokens do not delimit whole messages has none. Two final messages are one text.
    """
    finals, channel, at = [], None, 0
    while (message := _MESSAGE.match(text, at)) is not None:
        channel, at = message["channel"], message.end()
        if channel == "final":
            finals.append(message["text"])
        if text[at:].strip() in _ENDS:
            return "".join(finals) if channel == "final" else None
        if not text.startswith(_BETWEEN, at):
            return None
        at += len(_BETWEEN)
    return None


def _settings(table: HttpOracleTable, question: Question) -> dict[str, Any]:
    return {
        "model": table.model,
        "max_tokens": table.max_new,
        "temperature": RETRY_TEMPERATURE if question.attempt else 0,
        "seed": table.seed + question.attempt,
    }


def _response_format() -> orjson.Fragment:
    schema = {"name": "scores", "strict": True, "schema": answer_schema()}
    return orjson.Fragment(orjson.dumps({"type": "json_schema", "json_schema": schema}))


def _result(
    value: dict[str, Any], content: Any, thoughts: Any, reason: Any, salvage: bool
) -> OracleResult:
    usage = value.get("usage")
    num_new = usage.get("completion_tokens") if isinstance(usage, dict) else None
    num_new = num_new if isinstance(num_new, int) else None
    if isinstance(content, str) and content.strip():
        scores, is_salvaged = read_scores(content, salvage)
        if scores is not None:
            return OracleResult(scores, "", str(reason or "stop"), num_new, is_salvaged)
        failed = "parse_failed"
    else:
        failed = "reasoning_only" if thoughts else "empty_content"
        content = thoughts if isinstance(thoughts, str) else ""
    if reason not in (None, "stop"):
        failed = str(reason)
    return OracleResult(None, content, failed, num_new)


def _not_a_completion(value: dict[str, Any]) -> OracleResult:
    return OracleResult(None, json.dumps(value), "not_a_completion")
