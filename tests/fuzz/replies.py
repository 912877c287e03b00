"""Replies of a server to the `http` oracle."""

import atexit
import http.client
import io
import json
import random
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from nmoe_core.base.errors import NmoeError
from nmoe_core.config.quality import HttpOracleTable
from nmoe_core.config.rubric import Rubric
from nmoe_core.labels.documents import Documents
from nmoe_core.labels.label import label_shard
from nmoe_core.labels.oracle import read_records
from nmoe_core.labels.oracles import replies
from nmoe_core.labels.oracles.http import HttpOracle
from nmoe_core.shards.documents import Text
from tests.core.labels.oracles.loopback import Client, Loopback
from tests.core.labels.oracles.server import MODEL, SCORES
from tests.core.small_gradings import RUBRIC
from tests.fuzz.driver import Family

KEY = "s3cret-key-of-the-oracle"
_ELSEWHERE = b"PORT"  # becomes the port of a server that is not the oracle's


def _reply(body: bytes, *head: bytes, status: bytes = b"200 OK") -> bytes:
    lines = [b"HTTP/1.1 " + status, *(head or [b"Content-Length: %d" % len(body)])]
    return b"\r\n".join([*lines, b"", body])


def _choice(content: object, **message: object) -> dict[str, object]:
    said = {"content": content} | message
    return {"index": 0, "finish_reason": "stop", "message": said}


_ANSWER = json.dumps(SCORES)
_CHOICE = _choice(_ANSWER)
_GRADES = ["5", "-1", "4.0", "3.5", "true", "null", '"4"', "NaN", "Infinity", "1e2", "[1]"]
_ANSWERS = [json.dumps(SCORES).replace("4", grade) for grade in _GRADES]
_ANSWERS += [json.dumps(SCORES | {"other": 1}), json.dumps(SCORES | {"density": 0})]
_ANSWERS += [_ANSWER[:-1] + ', "density": 0}', _ANSWER.replace("density", "x"), f"Well: {_ANSWER}"]
_ANSWERS += [_ANSWER * 2, f"[{_ANSWER}]", f"```json\n{_ANSWER}\n```", _ANSWER[:-1], "{}", " "]
_VALUE = {"model": MODEL, "choices": [_CHOICE], "usage": {"completion_tokens": 41}}
_GOOD = json.dumps(_VALUE).encode()
_ECHO = f"Authorization: Bearer {KEY}"
_LOCATION = b"Location: http://127.0.0.1:%s/v1" % _ELSEWHERE
_PADDED = _GOOD + b" \n" * 40  # all of it is there before its last byte
_BODIES = [_ECHO.encode(), b"", b"[]", b"null", b"[" * 10**5, b'{"a":' * 10**5]
_BODIES += [
    *(json.dumps(_VALUE | {"choices": [_choice(answer)]}).encode() for answer in _ANSWERS),
    json.dumps(_VALUE | {"choices": [_choice(None, reasoning=_ANSWER)]}).encode(),
    json.dumps(_VALUE | {"choices": [_choice("no", reasoning_content=_ANSWER)]}).encode(),
]
_BODIES += [
    json.dumps(_VALUE | more).encode()
    for more in (
        {"model": KEY},
        {"model": [None]},
        {"error": {"message": _ECHO}},
        {"object": "error", "message": _ECHO},
        {"choices": []},
        {"choices": None},
        {"choices": [[]]},
        {"model": MODEL + "-mini"},
        {"model": None},
        {"model": MODEL + "-2026-01-31"},
        {"choices": [_CHOICE | {"finish_reason": [KEY]}]},
        {"choices": [_CHOICE | {"finish_reason": "length"}]},
        {"choices": [_CHOICE | {"message": {"content": _ECHO}}]},
        {"choices": [_CHOICE | {"message": {"content": None, "reasoning_content": _ECHO}}]},
        {"choices": [_CHOICE | {"message": {"content": "\ud800"}}]},
        {"usage": {"completion_tokens": 10**18}},
        {"usage": "much"},
    )
]
_PARTS = ("body", "headers", "status", "length", "end", "before")
_STATUSES = (
    b"200 201 204 206 301 302 307 308 400 401 404 408 413 418 429 500 502 503 999 000 20".split()
)
_HEADERS = [_LOCATION, b"X: y", b"X: " + b"y" * 60_000, b"X: y\r\n" * 90 + b"X: y", _ECHO.encode()]
_HEADERS += [
    b"Retry-After: " + when for when in (b"0", b"-1", b"nan", b"1e400", b"Sat, 99", b"\xff")
]
_HEADERS += [b"Set-Cookie: " + KEY.encode(), b"Content-Encoding: gzip", b"Connection: upgrade"]


def _any_reply(rng: random.Random, _: str) -> bytes:
    """A good reply, of which a part or two may be another's."""
    odd = rng.sample(_PARTS, rng.choice([0, 1, 1, 1, 2, 3]))
    body = rng.choice(_BODIES if "body" in odd else [_GOOD, _PADDED])
    head = rng.sample(_HEADERS, 1 + rng.randrange(2)) if "headers" in odd else []
    status = rng.choice(_STATUSES) if "status" in odd else b"200"
    form = rng.randrange(4)
    if "length" in odd:
        sizes = [0, 1, len(body) - 1, len(body) + 1, len(_GOOD), 10**12, 10**30, -1]
        head.append(b"Content-Length: %d" % rng.choice(sizes))
    elif form == 0:
        at = rng.randrange(len(body) + 1)
        pieces = [piece for piece in (body[:at], body[at:]) if piece]
        body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])
        head.append(b"Transfer-Encoding: chunked")
    elif form == 1:
        head.append(b"Content-Type: application/json")  # until it closes
    else:
        head.append(b"Content-Length: %d" % len(body))
    reply = _reply(body, *head, status=status + b" X")
    if "end" in odd:
        reply = reply[: -rng.randrange(1, len(_PADDED) - len(_GOOD))]  # what is gone may be spaces
    if "before" in odd:
        reply = _reply(b"", b"X: y", status=rng.choice([b"100 X", b"103 X", b"101 X"])) + reply
    return reply


def http_replies(directory: Path) -> Family:
    """Labels of one document by a server that sends a file and closes. The key must not be shown,
    and no other server may be asked."""
    servers = _servers()

    def read(root: Path) -> object:
        payload = (root / "reply").read_bytes()
        must_give = _is_plain(payload) and _scores_in(payload) is not None
        try:
            scores, reason = servers.labelled(payload)
        except NmoeError:
            assert not must_give, "a good reply is refused"
            raise
        # Scores that are right by chance, of a reply that is not whole, are wrong too.
        is_right = not must_give if scores is None else scores == _scores_in(payload)
        return scores, reason, is_right

    def is_right(_: Path, found: Any) -> bool:
        return found[2]

    return Family({"reply": _reply(_GOOD)}, ("reply",), read, is_right, _any_reply)


class _Servers:
    """An oracle's server that sends `served`, and another that counts who connects."""

    def __init__(self) -> None:
        self.served, self.others = b"", 0
        self.own, self.other = Loopback(self._talk), Loopback(self._note)

    async def _talk(self, client: Client) -> None:
        await client.request()
        await client.send(self.served)

    async def _note(self, client: Client) -> None:
        self.others += 1

    def labelled(self, reply: bytes) -> tuple[object, ...]:
        """Scores and reason of the record that a reply leads to. Raises what the labelling does."""
        self.served = reply.replace(_ELSEWHERE, b"%d" % self.other.port)
        settings = {"max_attempts": 1, "concurrency": 1, "max_outage_s": 0.0}
        asked = {"base_url": self.own.url, "model": MODEL, **settings}
        oracle = HttpOracle(HttpOracleTable.model_validate(asked), Rubric.load(RUBRIC), KEY)
        text = lambda _: Text("a document", False)  # noqa: E731
        documents = Documents([("web//a.npy#s=0:e=9", "web")], {}, text, lambda _: 9)
        refusal, found = None, ()
        with tempfile.TemporaryDirectory() as made, patch.object(replies, "FIRST_PAUSE_S", 0.001):
            try:
                label_shard(documents, Path(made), oracle)
                (record,) = read_records(Path(made) / "scores.jsonl")
                found = (record.get("scores"), record["finish_reason"])
            except NmoeError as error:
                refusal = error
            kept = b"".join(path.read_bytes() for path in Path(made).rglob("*") if path.is_file())
        assert KEY not in f"{kept}{found}{refusal and refusal.line()}", "the key is shown or kept"
        assert self.others == 0, "another server was asked"
        if refusal is not None:
            raise refusal
        return found


@cache
def _servers() -> _Servers:
    servers = _Servers()
    atexit.register(servers.own.close)
    atexit.register(servers.other.close)
    return servers


_ANNOUNCEMENTS = re.compile(rb"\A(HTTP/1\.1 1(?!01)\d\d[^\r\n]*\r\n([^\r\n]+\r\n)*\r\n)+")
_PLAIN_HEADS = re.compile(
    rb"(?:HTTP/1\.1 10[03] X\r\nX: y\r\n\r\n)?"
    rb"HTTP/1\.1 200 X\r\n(?:X: y*\r\n|Content-Type: [a-z/]+\r\n|Location: http[ -~]*\r\n)*"
    rb"(?:(?:Content-Length: (\d+)|Transfer-Encoding: chunked)\r\n)?\r\n"
)

_CHUNKS = re.compile(rb"(?:[1-9a-f][0-9a-f]*\r\n[^\r\n]+\r\n)*0\r\n\r\n")


def _is_plain(payload: bytes) -> bool:
    """Whether no reader of HTTP may refuse a reply that `http.client` reads."""
    head = _PLAIN_HEADS.match(payload)
    if head is None or head.end() > 2**14:
        return False
    size = len(payload) - head.end()
    if b"chunked" in head[0]:
        return _CHUNKS.fullmatch(payload, head.end()) is not None
    return head[1] is None or head[1] == b"%d" % size


class _Bytes:
    """What `http.client` takes for a socket."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._payload)


def _scores_in(payload: bytes) -> object:
    """The scores of a reply as the standard library reads it; None where it holds none."""
    payload = _ANNOUNCEMENTS.sub(b"", payload)  # `http.client` passes over those of 100 alone
    try:
        reply = http.client.HTTPResponse(_Bytes(payload))  # pyright: ignore[reportArgumentType]
        reply.begin()
        value = json.loads(reply.read())
        named, choice = value.get("model"), value["choices"][0]
        answer = re.sub(r"\A\s*```(?:json)?\s*\n|\n\s*```\s*\Z", "", choice["message"]["content"])
        pairs = json.loads(answer, object_pairs_hook=list)
    except (http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError):
        return None
    except (RecursionError, OverflowError):
        return None
    is_sure = reply.status == 200 and not value.get("error") and value.get("object") != "error"
    is_asked = named is None or re.fullmatch(MODEL + r"(-\d{4}-?\d\d-?\d\d)?", str(named))
    if not is_sure or not is_asked or not all(map(_is_grade, pairs)):
        return None
    return dict(pairs) if sorted(name for name, _ in pairs) == sorted(SCORES) else None


def _is_grade(pair: object) -> bool:
    """Whether a pair of an answer is a name and a whole number from 0 to 4."""
    grade = pair[1] if isinstance(pair, tuple) else None
    return type(grade) in (int, float) and grade in range(5)
