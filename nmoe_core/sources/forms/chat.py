"""Chats as text: a list of messages, rendered by a template.

A template is a name of `TEMPLATES` or the text of a Jinja template, which gets `messages`. It runs
in jinja2's sandbox, so it cannot reach Python's internals. Each message has a role and a content,
which is a text or a list of parts; parts that are not text are refused, as is a message without
content, because a template would leave both out silently.
"""

from collections.abc import Callable
from datetime import datetime
from functools import cache
from typing import Any

from nmoe_core.base.errors import SourceError
from nmoe_core.sources.forms.encoding import missing_extra

TEMPLATES = {
    "chatml": "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}",
    "plain": "{% for message in messages %}{{ message.role }}: {{ message.content }}\n\n"
    "{% endfor %}",
}
Render = Callable[[Any], str]
"""Makes the text of a record's messages; a ValueError describes bad messages."""


def is_template(text: str) -> bool:
    """Whether a text names a template, or is one."""
    return text in TEMPLATES or "{" in text


@cache
def renderer(template: str, source: str) -> Render:
    """The function that renders the messages of a source. Raises SourceError if the template has
    an error of syntax (E-SOURCE-TEMPLATE), or jinja2 is not installed (E-SOURCE-EXTRA)."""
    try:
        from jinja2 import TemplateError

        from nmoe_core.text.chat.process import environment_at
    except ImportError as error:
        raise missing_extra("a chat template", source) from error
    environment = environment_at(datetime(2000, 1, 1))
    try:
        compiled = environment.from_string(TEMPLATES.get(template, template))
    except TemplateError as error:
        raise SourceError(
            f"chat_template is not a Jinja template: {error}",
            where=source,
            do=f"correct it, or name one of {', '.join(TEMPLATES)}",
            code="E-SOURCE-TEMPLATE",
        ) from error

    def render(value: Any) -> str:
        messages = _messages(value)
        try:
            return compiled.render(messages=messages)
        except (TemplateError, ArithmeticError, LookupError, TypeError) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from None

    return render


def _messages(value: Any) -> list[dict[str, Any]]:
    """The messages, each with its content as one text."""
    if not isinstance(value, list):
        raise ValueError(f"the messages are {type(value).__name__}, not a list")
    found = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is {type(message).__name__}, not an object")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} has no role")
        found.append(message | {"content": _content(message.get("content"), number)})
    return found


def _content(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"the content of message {number} is {type(content).__name__}, not text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            raise ValueError(f"message {number} has a part of type {str(kind)[:40]!r}, not text")
        texts.append(text)
    return "".join(texts)
