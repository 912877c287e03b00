"""A chat-completions server on loopback that answers, or misbehaves, as a test tells it to."""

import asyncio
import json
import re
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nmoe_core.config.quality import HttpOracleTable
from nmoe_core.config.rubric import Rubric
from nmoe_core.labels.oracle import OracleResult, Question
from nmoe_core.labels.oracles.http import HttpOracle
from nmoe_core.labels.scores import QUALITY
from nmoe_core.text.harmony import encoding
from tests.core.labels.oracles.loopback import Client, Loopback
from tests.core.small_gradings import RUBRIC

MODEL = "judge-1"
SCORES = {name: i for i, name in enumerate(QUALITY.names)}
GOOD = json.dumps(SCORES)
OTHER = json.dumps(dict.fromkeys(QUALITY.names, 4))
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"


def document_in(prompt: str) -> str:
    """The document of a prompt: what stands between the two lines of one code."""
    found = re.search(r"Text (\d{18}):\n\n(.*)\n\nEnd of text \1\. Output", prompt, re.DOTALL)
    assert found is not None
    return found[2]


def tokens_of(text: str) -> list[int]:
    """Tokens of a model's answer, whose control tokens are spelled."""
    return encoding().encode(text, allowed_special="all")


@dataclass
class Reply:
    """What to send: a whole response, some bytes and a reset, or nothing at all."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    after_s: float = 0.0
    resets: bool = False


Behaviour = Callable[[str, int], Reply]


def grades_of(document: str) -> dict[str, int]:
    """The scores this server gives a document: a function of its text alone."""
    return {
        name: (len(document) * 7 + i * len(document[:9])) % 5
        for i, name in enumerate(QUALITY.names)
    }


def _choice(reason: str, choice: dict[str, Any], more: dict[str, Any]) -> Reply:
    choices = [{"index": 0, "finish_reason": reason, **choice}]
    value = {"model": MODEL, "choices": choices, "usage": {"completion_tokens": 41}}
    return Reply(json.dumps(value | more).encode())


def completion(content: Any, *, reason: str = "stop", message: Any = None, **more: Any) -> Reply:
    """A chat completion with this content."""
    said = {"role": "assistant", "content": content, **(message or {})}
    return _choice(reason, {"message": said}, more)


def text_completion(text: Any, *, reason: str = "stop") -> Reply:
    """A plain completion with this text."""
    return _choice(reason, {"text": text}, {})


def answers(document: str, nth: int) -> Reply:
    """The normal behaviour."""
    return completion(json.dumps(grades_of(document)))


class JudgeServer(Loopback):
    """Answers about documents; remembers who was asked about and how often.

    Oracles that ask it are made by `oracle`, from a table of patient settings.
    """

    def __init__(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.behave: Behaviour = answers
        self.asked: Counter[str] = Counter()
        self.requests: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.paths: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.most_at_once = self.at_once = 0
        super().__init__(self._talk, port, tls)

    def table(self, **more: Any) -> HttpOracleTable:
        settings = {"base_url": self.url, "timeout_s": 60.0, "max_outage_s": 60.0, "concurrency": 8}
        return HttpOracleTable.model_validate({"model": MODEL, **settings, **more}, strict=False)

    def oracle(self, extract_embedded: bool = False, **more: Any) -> HttpOracle:
        return HttpOracle(
            self.table(**more), Rubric.load(RUBRIC), extract_embedded=extract_embedded
        )

    def always(self, reply: Reply) -> None:
        self.behave = lambda document, nth: reply

    def ask(self, documents: list[str], **more: Any) -> dict[str, OracleResult]:
        """Results by document; every question is answered exactly once."""
        results = list(self.oracle(**more).label(map(Question, documents)))
        assert sorted(i for i, _ in results) == list(range(len(documents)))
        return {documents[i]: result for i, result in results}

    def ask_one(self, document: str = "a document", **more: Any) -> OracleResult:
        return self.ask([document], **more)[document]

    def settle(self) -> None:
        """Wait until requests that were under way when their client left are done with."""
        before = None
        while (now := (self.at_once, self.asked.total(), self.answered.total())) != before:
            before = now
            time.sleep(0.1)

    async def _talk(self, client: Client) -> None:
        while await self._respond(client, *await client.request()):
            pass

    async def _respond(self, client: Client, head: bytes, body: bytes) -> bool:
        request = json.loads(body)
        user = request["prompt"] if "prompt" in request else request["messages"][-1]["content"]
        document = document_in(user)
        self.requests.append(request)
        reply = self.behave(document, self.asked[document])
        self.asked[document] += 1
        self.headers.append(head.decode())
        self.paths[head.split()[1].decode()] += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(reply.after_s)
        finally:
            self.at_once -= 1
        lines = [f"HTTP/1.1 {reply.status} X", f"Content-Length: {len(reply.body)}"]
        lines += [f"{key}: {value}" for key, value in reply.headers.items()]
        payload = "\r\n".join([*lines, "", ""]).encode() + reply.body
        if reply.resets:
            await client.send(payload[: len(payload) * 2 // 3] if reply.body else b"")
            raw: socket.socket = client.writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        await client.send(payload)
        self.answered[document] += reply.status == 200
        return True


def documents_of(count: int) -> list[str]:
    return [f"document {i} {'x' * (i % 13)}".strip() for i in range(count)]
