"""The process that renders chat templates, with limits of memory and of processor time.

A template is a program from the checkpoint's author. jinja2's sandbox keeps it from Python's
internals, but does not limit its loops or its texts, so this process ends if a limit is exceeded.
Messages are JSON over a pipe; the process's argument is the pipe's file descriptor. The first
message has the limits, the templates and the time for `strftime_now`. Each later one has a
template's name and its variables. The answer is the text, or why the template refuses these
variables, or what is wrong with the template.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# A text may be longer than its variables by this factor, and by as many characters.
MAX_GROWTH = 4
MAX_MORE = 2**17
_WRONG = (SecurityError, TemplateSyntaxError, MemoryError, RecursionError, OverflowError)


def main() -> None:
    """Answer the messages from the pipe until it is closed."""
    pipe = Connection(int(sys.argv[1]))
    asked = json.loads(pipe.recv_bytes())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (asked["memory_bytes"], asked["memory_bytes"]))
    environment = environment_at(datetime.fromisoformat(asked["now"]))
    templates: dict[str, jinja2.Template] = {}
    while True:
        try:
            payload = pipe.recv_bytes()
        except EOFError:
            return
        # After this time, the signal ends the process.
        signal.setitimer(signal.ITIMER_PROF, asked["cpu_s"])
        try:
            name, variables = json.loads(payload)
            if name not in templates:
                templates[name] = environment.from_string(asked["templates"][name])
            text = templates[name].render(variables)
            is_short = len(text) <= MAX_GROWTH * len(payload) + MAX_MORE
            answer = {"text": text} if is_short else {"wrong": "its text is too long"}
        except _WRONG as error:
            answer = {"wrong": str(error) or type(error).__name__}
        except Exception as error:  # noqa: BLE001 (of the template's code)
            answer = {"refused": str(error) or type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send_bytes(json.dumps(answer).encode())


def environment_at(now: datetime) -> ImmutableSandboxedEnvironment:
    """The environment in which transformers renders chat templates, at a fixed time."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": now.strftime,
        "dict": _make_dict,
        "namespace": _PublicNamespace,
    }
    return environment


class _Generation(Extension):
    """The block `generation`, which marks an assistant's text for training, renders as its
    content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads it)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _PublicNamespace(Namespace):
    """A namespace without names that begin with `_`, some of which Python itself reads."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_public(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"{name!r} begins with an underscore")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


if __name__ == "__main__":
    main()
