"""The two forms of OpenAI's protocol: chat completions and plain completions.

With chat, the server renders the prompt. With completions, the prompt is the text that `harmony`
renders, for gpt-oss servers without chat. vLLM, SGLang and llama-server parse the special tokens of
this text. Ollama wraps the text in its own template, so use chat with Ollama.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import orjson

from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.config.rubric import REASON, Rubric
from nmoe_core.labels.oracle import RETRY_TEMPERATURE, OracleResult, Question
from nmoe_core.labels.oracles.expected import TOP_LOGPROBS, expected_scores, require_digits
from nmoe_core.labels.oracles.harmony import NO_LIMIT, STOP_IDS, JudgePrompt, encoding, fenced
from nmoe_core.labels.oracles.markers import BARS, FORMS, broken, pattern
from nmoe_core.labels.scores import Scale, read_scores

if TYPE_CHECKING:
    from nmoe_core.config.quality import HttpOracleTable

OPEN_FINAL = "<|channel|>final<|message|>"
# One Harmony message: its channel, and a text without control tokens.
_MESSAGE = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>(?P<channel>[a-z]+)(?: to=[^\s<]+)?"
    r"(?: ?<\|constrain\|>json)?<\|message\|>(?P<text>[^<]*(?:<(?!\|)[^<]*)*)"
)
_BETWEEN = "<|end|>"
_REST = re.compile(r"(?:<\|(?:end|return|call)\|>\s*)?\Z")


ANSWER_FORMATS = ("json_schema", "json_object", "text")


def response_format(scale: Scale, has_reason: bool) -> orjson.Fragment:
    """The JSON schema of an answer, as the request's `response_format`."""
    grades = zip(scale.names, scale.lowest, scale.highest)
    keys: dict[str, Any] = {REASON: {"type": "string"}} if has_reason else {}
    keys |= {
        name: {"type": "integer", "minimum": low, "maximum": high} for name, low, high in grades
    }
    schema = {
        "type": "object",
        "properties": keys,
        "required": list(keys),
        "additionalProperties": False,
    }
    named = {"name": "scores", "strict": True, "schema": schema}
    return orjson.Fragment(orjson.dumps({"type": "json_schema", "json_schema": named}))


def usage_of(value: dict[str, Any]) -> tuple[int, int]:
    """Tokens of prompt and answer in a reply; 0 if the server does not count them."""
    usage = value.get("usage")
    named = usage if isinstance(usage, dict) else {}
    tokens_in, tokens_out = (named.get(key) for key in ("prompt_tokens", "completion_tokens"))
    return _count(tokens_in), _count(tokens_out)


def _count(value: object) -> int:
    return value if type(value) is int and 0 < value < 2**31 else 0


# Facts on which labels depend, but replies do not.
_NOT_ASKED = ("salvage", "max_new", "served", "min_grade_mass", "answer_format")


class Dialect:
    """Builds requests to `path` below a server's base URL, and reads the replies.

    `facts` are the values that answers depend on in addition to the table.
    """

    path: str
    forms: tuple[str, ...]  # of the special tokens that a document may not spell

    def __init__(self, table: HttpOracleTable, rubric: Rubric, extract_embedded: bool) -> None:
        self._table = table
        self._extract_embedded = extract_embedded
        self._scale = Scale.of(rubric)
        self._has_reason = rubric.has_reason
        self._fixed: dict[str, Any] = {}
        extra = table.extra_body
        self.facts: dict[str, Any] = {"extra_body": extra} if extra else {}
        self.facts |= rubric.form
        more = table.special_tokens
        self.facts |= {"special_tokens": sorted(more)} if more else {}
        self._markers = pattern(more, self.forms)
        limit = extra.get("max_completion_tokens", table.max_new)
        self.max_new: int | None = limit if isinstance(limit, int) else None
        self.answer_format = "json_schema"

    def answer_formats(self) -> tuple[str, ...]:
        """The forms of the answer that requests may ask for, in the order of trial."""
        is_set = "response_format" in (*self._table.extra_body, *self._table.omit)
        if is_set or "response_format" not in self._fixed:
            return ("json_schema",)
        named = self._table.answer_format
        return ANSWER_FORMATS if named == "auto" else (named,)

    def asked(self, facts: dict[str, Any], answer_format: str) -> dict[str, Any]:
        """The facts on which a reply depends: neither the parser, nor the limit of its length; the
        form that the request asks for, not the setting."""
        asked = {key: facts[key] for key in facts if key not in _NOT_ASKED}
        if answer_format != "json_schema":
            asked["answer_format"] = answer_format
        extra = {k: v for k, v in self._table.extra_body.items() if k != "max_completion_tokens"}
        return asked | {"extra_body": extra, "api": self._table.api}

    def payload(self, question: Question) -> bytes:
        """The request's body."""
        settings = {
            "model": self._table.model,
            "max_tokens": self._table.max_new,
            "temperature": RETRY_TEMPERATURE if question.is_drawn else 0,
            "seed": question.seed(self._table.seed),
        }
        prompt = self._prompt(broken(question.text, self._markers))
        extra = self._table.extra_body
        if "max_completion_tokens" in extra:  # servers refuse both keys together
            del settings["max_tokens"]
        fields = settings | self._fixed
        if self.answer_format == "json_object":
            fields["response_format"] = {"type": "json_object"}
        elif self.answer_format == "text":
            del fields["response_format"]
        fields |= extra
        for name in self._table.omit:
            fields.pop(name, None)
        return orjson.dumps(fields | prompt)

    def read_reply(self, value: dict[str, Any]) -> OracleResult:
        """Read the result from a reply's JSON object; scores are read only from the final answer.

        Finish reasons of a failure: `not_a_completion`, `empty_content`, `refusal`,
        `reasoning_only`, `parse_failed`, `no_logprobs`, `low_grade_mass`, or the server's own
        finish reason if it is not `stop` (`length`, `content_filter`).
        """
        try:
            choice = value["choices"][0]
            reason = choice.get("finish_reason")
            content, thoughts, is_bare = self._answer(choice)
            refusal = (choice.get("message") or {}).get("refusal")
        except (KeyError, IndexError, TypeError, AttributeError):
            return OracleResult(None, json.dumps(value), "not_a_completion")
        num_new = usage_of(value)[1] or None
        if isinstance(content, str) and content.strip():
            said = read_scores(content, self._extract_embedded, self._scale, self._has_reason)
            scores = said.scores
            failed = "parse_failed"
            if scores is not None and self._table.grades == "expected":
                bound = self._table.min_grade_mass
                given = choice.get("logprobs")
                scores, failed = expected_scores(said.text, given, self._scale, bound)
            if scores is not None:
                is_salvaged = said.is_embedded or is_bare
                ended = str(reason or "stop")
                return OracleResult(scores, "", ended, num_new, is_salvaged, reason=said.reason)
        elif isinstance(refusal, str) and refusal:
            failed = "refusal"
            content = refusal
        else:
            failed = "reasoning_only" if thoughts else "empty_content"
            content = thoughts if isinstance(thoughts, str) else ""
        if reason not in (None, "stop"):
            failed = str(reason)
        return OracleResult(None, content, failed, num_new)

    def _prompt(self, document: str) -> dict[str, Any]:
        raise NotImplementedError

    def _answer(self, choice: Any) -> tuple[Any, Any, bool]:
        """The final answer, the reasoning before it, and whether the answer lacks a channel."""
        raise NotImplementedError


class ChatDialect(Dialect):
    """`/chat/completions`: sends rubric and document as messages and requests the JSON schema."""

    path = "chat/completions"
    forms = FORMS

    def __init__(self, table: HttpOracleTable, rubric: Rubric, extract_embedded: bool) -> None:
        super().__init__(table, rubric, extract_embedded)
        self._system = orjson.Fragment(orjson.dumps({"role": "system", "content": rubric.text()}))
        if table.grades == "expected":
            require_digits(self._scale)
            self._fixed |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
            self.facts |= {"grades": table.grades, "min_grade_mass": table.min_grade_mass}
        self._fixed["response_format"] = response_format(self._scale, self._has_reason)
        if table.reasoning_effort is not None:
            self._fixed["reasoning_effort"] = table.reasoning_effort

    def _prompt(self, document: str) -> dict[str, Any]:
        user = {"role": "user", "content": document.join(fenced(document))}
        return {"messages": [self._system, user]}

    def _answer(self, choice: Any) -> tuple[Any, Any, bool]:
        message = choice["message"]
        thoughts = message.get("reasoning_content") or message.get("reasoning")
        content = message.get("content")
        if isinstance(content, list):  # some servers send the text in parts
            content = "".join(part["text"] for part in content if part.get("type") == "text")
        if isinstance(content, str):
            written, content = without_thoughts(content)
            thoughts = thoughts or written
        return content, thoughts, False


class CompletionsDialect(Dialect):
    """`/completions`: sends the Harmony prompt as text, names the stop tokens, and requests special
    tokens in the reply.

    With reasoning `none`, the prompt opens the final channel, so the answer is only the JSON
    object, and the schema is requested. Otherwise no schema is requested, because it would prevent
    the model from reasoning.
    """

    path = "completions"
    forms = (BARS,)  # the only form of Harmony

    def __init__(self, table: HttpOracleTable, rubric: Rubric, extract_embedded: bool) -> None:
        super().__init__(table, rubric, extract_embedded)
        self._is_opened = table.reasoning_effort == "none"
        prompt = JudgePrompt(rubric, NO_LIMIT, "none" if self._is_opened else "low")
        self._head, self._tail = (encoding().decode(ids) for ids in (prompt.prefix, prompt.suffix))
        stop = sorted(STOP_IDS)
        self._fixed |= {"stop_token_ids": stop, "skip_special_tokens": False}
        if self._is_opened:
            self._fixed["response_format"] = response_format(self._scale, self._has_reason)
        prompt_digest = sha256_json([self._head, self._tail, stop])
        self.facts |= {"api": "completions", "prompt_sha256": prompt_digest}

    def _prompt(self, document: str) -> dict[str, Any]:
        return {"prompt": f"{self._head}{document.join(fenced(document))}{self._tail}"}

    def _answer(self, choice: Any) -> tuple[Any, Any, bool]:
        text = choice["text"]
        if not isinstance(text, str):
            return None, None, False
        final = final_text(OPEN_FINAL + text if self._is_opened else text)
        if final is None and self._extract_embedded and "final" in text:
            return text.rpartition("final")[2], text, True
        return final, text, False


def url_of(table: HttpOracleTable) -> str:
    """The URL of the requests to a server."""
    base, mark, query = table.base_url.partition("?")
    return f"{base.rstrip('/')}/{DIALECTS[table.api].path}{mark}{query}"


def headers_of(table: HttpOracleTable, api_key: str | None) -> dict[str, str]:
    """The headers of the requests to a server."""
    headers = {"Content-Type": "application/json", **table.headers}
    if api_key:
        prefix = "Bearer " if table.api_key_header == "Authorization" else ""
        headers[table.api_key_header] = f"{prefix}{api_key}"
    return headers


def without_thoughts(text: str) -> tuple[str, str]:
    """The reasoning that a model wrote before its answer, as `<think>...</think>`, and the answer.
    The opening tag may be missing, because some templates write it into the prompt."""
    thoughts, mark, answer = text.partition("</think>")
    is_opened = thoughts.lstrip().startswith("<think>")
    if mark and (is_opened or "<think>" not in thoughts):
        return thoughts, answer
    return (text, "") if is_opened else ("", text)


DIALECTS = {"chat": ChatDialect, "completions": CompletionsDialect}


def final_text(text: str) -> str | None:
    """The text of the final channel, if the whole answer is Harmony messages and ends in that
    channel.

    A final channel inside another message is a quotation, so the result is None unless control
    tokens delimit whole messages. Two final messages are joined.
    """
    finals = []
    at = 0
    while (message := _MESSAGE.match(text, at)) is not None:
        channel = message["channel"]
        at = message.end()
        if channel == "final":
            finals.append(message["text"])
        if _REST.match(text, at):
            return "".join(finals) if channel == "final" else None
        if not text.startswith(_BETWEEN, at):
            return None
        at += len(_BETWEEN)
    return None
