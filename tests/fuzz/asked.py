"""Replies of a server to the `http` oracle, and the SQL of selections."""

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

import pyarrow as pa

from nmoe_core.attributes import sandbox
from nmoe_core.attributes.where import spellings
from nmoe_core.base.errors import ConfigError, NmoeError, one_line
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
from tests.core.quality import RUBRIC
from tests.fuzz.driver import Family

KEY = "s3cret-key-of-the-oracle"
_ELSEWHERE = b"PORT"  # becomes the port of a server that is not the oracle's


def _reply(body: bytes, *head: bytes, status: bytes = b"200 OK") -> bytes:
    lines = [b"HTTP/1.1 " + status, *(head or [b"Content-Length: %d" % len(body)])]
    return b"\r\n".join([*lines, b"", body])


_CHOICE = {"index": 0, "finish_reason": "stop", "message": {"content": json.dumps(SCORES)}}
_VALUE = {"model": MODEL, "choices": [_CHOICE], "usage": {"completion_tokens": 41}}
_GOOD = json.dumps(_VALUE).encode()
_ECHO = f"Authorization: Bearer {KEY}"
_LOCATION = b"Location: http://127.0.0.1:%s/v1" % _ELSEWHERE
_BODIES = [_GOOD, _GOOD, _ECHO.encode(), b"", b"[]", b"null", b"[" * 10**5, b'{"a":' * 10**5]
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
        {"choices": [_CHOICE | {"finish_reason": [KEY]}]},
        {"choices": [_CHOICE | {"finish_reason": "length"}]},
        {"choices": [_CHOICE | {"message": {"content": _ECHO}}]},
        {"choices": [_CHOICE | {"message": {"content": None, "reasoning_content": _ECHO}}]},
        {"choices": [_CHOICE | {"message": {"content": "\ud800"}}]},
        {"usage": {"completion_tokens": 10**18}},
        {"usage": "much"},
    )
]
_STATUSES = (
    b"200 201 204 206 301 302 307 308 400 401 404 408 413 418 429 500 502 503 999 000 20".split()
)
_HEADERS = [_LOCATION, b"X: y", b"X: " + b"y" * 60_000, b"X: y\r\n" * 90 + b"X: y", _ECHO.encode()]
_HEADERS += [
    b"Retry-After: " + when for when in (b"0", b"-1", b"nan", b"1e400", b"Sat, 99", b"\xff")
]
_HEADERS += [b"Set-Cookie: " + KEY.encode(), b"Content-Encoding: gzip", b"Connection: upgrade"]


def _any_reply(rng: random.Random) -> bytes:
    body, head = rng.choice(_BODIES), rng.sample(_HEADERS, rng.choice([0, 0, 1, 2]))
    status = rng.choice(_STATUSES) if rng.randrange(2) else b"200"
    match rng.randrange(6):
        case 0:
            cut = rng.randrange(len(body) + 1)
            parts = [b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:cut], body[cut:], b"")]
            body = b"".join(part for part in parts if part[0] != 48) + parts[-1]
            head.append(b"Transfer-Encoding: chunked")
        case 1:
            head.append(b"Content-Type: application/json")  # until it closes
        case 2:
            size = rng.choice([0, 1, len(body) - 1, len(body) + 1, 10**12, 10**30, -1])
            head.append(b"Content-Length: %d" % size)
        case _:
            head.append(b"Content-Length: %d" % len(body))
    before = _reply(b"", b"X: y", status=rng.choice([b"100", b"103", b"101"]))
    return (before if rng.random() < 0.1 else b"") + _reply(body, *head, status=status + b" X")


def http_replies(directory: Path) -> Family:
    """Labels of one document by a server that sends a file and closes. The key must not be shown,
    and no other server may be asked."""
    servers = _servers()

    def read(root: Path) -> object:
        return servers.labelled((root / "reply").read_bytes())

    def is_right(root: Path, found: Any) -> bool:
        given = isinstance(found[0], dict)  # else a failed label or a refusal, as for any bad reply
        return not given or found[0] == _scores_in((root / "reply").read_bytes())

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
        """Scores and reason of the record that a reply leads to, or the code of a refusal."""
        self.served = reply.replace(_ELSEWHERE, b"%d" % self.other.port)
        settings = {"max_attempts": 1, "concurrency": 1, "max_outage_s": 0.0}
        asked = {"base_url": self.own.url, "model": MODEL, **settings}
        oracle = HttpOracle(HttpOracleTable.model_validate(asked), Rubric.load(RUBRIC), KEY)
        text = lambda _: Text("a document", False)  # noqa: E731
        documents = Documents([("web//a.npy#s=0:e=9", "web")], {}, text, lambda _: 9)
        with tempfile.TemporaryDirectory() as made, patch.object(replies, "FIRST_PAUSE_S", 0.001):
            try:
                label_shard(documents, Path(made), oracle)
                (record,) = read_records(Path(made) / "scores.jsonl")
                found = (record.get("scores"), record["finish_reason"])
            except NmoeError as error:
                found = (None, error.line())
            kept = b"".join(path.read_bytes() for path in Path(made).rglob("*") if path.is_file())
        assert KEY not in f"{kept}{found}", "the key is shown or kept"
        assert self.others == 0, "another server was asked"
        return found


@cache
def _servers() -> _Servers:
    servers = _Servers()
    atexit.register(servers.own.close)
    atexit.register(servers.other.close)
    return servers


_ANNOUNCEMENTS = re.compile(rb"\A(HTTP/1\.1 1(?!01)\d\d[^\r\n]*\r\n([^\r\n]+\r\n)*\r\n)+")


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
        scores = json.loads(value["choices"][0]["message"]["content"])
        return scores if reply.status == 200 else None
    except (http.client.HTTPException, ValueError, LookupError, TypeError):
        return None


# Selections.

_TABLE = pa.table(
    {
        "lang": ["en", "de", None, "zh", "", "it's"] * 2,
        "n": pa.array([10, 50, 51, None, -3, 2**31 - 1] * 2, pa.int32()),
        "share": [0.4, None, 0.0, 1.0, float("inf"), -0.5] * 2,
        "ok": [True, False, None] * 4,
        "tags": [["a"], [], None, ["a", "b"], [None], ["zh"]] * 2,
    }
)
_TEXTS = ("lang", "a.LANG", "'en'", "''", "'it''s'", "lower(lang)", "lang || 'x'", "left(lang, 1)")
_NUMBERS = ("n", "a.n", "share", "0", "-1", "50", "0.4", "1e308", "n + 1", "n / 3", "n % 7", "null")
_NUMBERS += ("abs(share)", "length(lang)", "len(tags)", "n::double", "coalesce(n, 0)", "2147483647")
_OTHERS = ("ok", "true", "null::boolean", "list_contains(tags, 'a')", "isnan(share)", "ok is null")
_HOSTILE = (
    *("(select true)", "exists(select 1)", "lang in (select 'en')", "1) from a where (1 = 1"),
    *("true) union (select true", "true); copy a to 'stolen'; select (true", "columns(*)", "*"),
    *("read_text('/etc/passwd') > ''", "getenv('HOME') > ''", "current_setting('threads') > ''"),
    *("random() < 2", "now() is not null", "current_date > date '2020-01-01'", "hash(lang) > 1"),
    *("repeat('a', 2000000000) = 'b'", "len(range(1000000000)) > 1", "nextval('s') > 1"),
    *("count(*) > 1", "lag(ok) over ()", "unnest([true])", "lang = ?", "$1", "a.lang.x = 1"),
    *("n > 1 group by all", "lang::json = 'a'", "lang::blob = 'a'", "a is null", "rowid > 1"),
    "(select content from read_text('http://127.0.0.1:1/a')) > ''",
    "regexp_matches(lang, '(a*)*(a*)*(a*)*b')",
    "list_filter(tags, x -> true) = []",
)
# Words that no accepted rule holds outside its texts, comments and quoted names.
_NEVER = re.compile(
    r"\b(select|(?<!distinct )from|random|now|read_\w+|getenv|current_\w+|copy|union|over|repeat|"
    r"range|hash|count|unnest|nextval|json|blob|columns|rowid)\b",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|/\*.*?\*/", re.DOTALL)


def _condition(rng: random.Random, depth: int) -> str:
    """A condition of the grammar that a rule may have, or now and then of none."""
    text, number = rng.choice(_TEXTS), rng.choice(_NUMBERS)
    inner = [_condition(rng, depth - 1) for _ in range(2)] if depth else [rng.choice(_OTHERS)] * 2
    sign = rng.choice(["=", "!=", "<", "<=", ">", ">=", "is distinct from"])
    forms = (
        f"{text} {sign} {rng.choice(_TEXTS)}",
        f"{number} {sign} {rng.choice(_NUMBERS)}",
        f"{number} between {rng.choice(_NUMBERS)} and {rng.choice(_NUMBERS)}",
        f"{text} {rng.choice(['', 'not '])}in ('en', {rng.choice(_TEXTS)})",
        f"{text} {rng.choice(['like', 'ilike', 'not like'])} '{rng.choice(['e%', '_', '%'])}'",
        f"case when {inner[0]} then {inner[1]} else {rng.choice(_OTHERS)} end",
        rng.choice(_OTHERS),
    )
    joined = f"({inner[0]}) {rng.choice(['and', 'or', 'and'])} ({inner[1]})"
    if rng.random() < 0.03:
        return rng.choice(_HOSTILE)
    return rng.choice([joined, f"not ({inner[0]})", *rng.sample(forms, 3)])


def selections(_: Path) -> Family:
    """Rules of a selection, in this process: a process for each would take half a second."""
    ours, plain = sandbox.opened(), sandbox.opened()
    plain.register("a", _TABLE)
    columns = {f"c{i}": name for i, name in enumerate(_TABLE.column_names)}
    names = spellings({f"a.{name}": column for column, name in columns.items()})
    table = _TABLE.rename_columns(list(columns))

    def text(root: Path) -> str:
        return (root / "rule.sql").read_bytes().decode("utf-8", "replace")

    def read(root: Path) -> object:
        try:
            clauses = sandbox.conditions(ours, text(root), names, table.slice(0, 0))
            found = sandbox.evaluated(ours, table, clauses).to_arrow_table()
        except sandbox.REFUSED as error:
            raise ConfigError(one_line(error), code="E-SELECT-EXPRESSION") from error
        return [all(row.values()) for row in found.to_pylist()]

    def is_right(root: Path, found: object) -> bool:
        asked = f"select (\n{text(root)}\n) is true from a"
        rows = [row for (row,) in plain.execute(asked).fetchall()]
        return found == rows and not _NEVER.search(" ".join(_QUOTED.sub("", text(root)).split()))

    files = {"rule.sql": b"lang in ('en', 'de') and n >= 50 and not (share < 0.4 or ok is null)"}
    return Family(files, (".sql",), read, is_right, lambda rng: _condition(rng, 4).encode())
