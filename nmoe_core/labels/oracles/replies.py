"""What a server's reply means: an answer, a refusal of the document, or a failure of the server.

| reply | kind |
|---|---|
| 200 with a JSON object that is not an error | `answer` |
| 400, 413, 422 and any other 4xx not named below | `document`: its failed label |
| 429, 503, no connection | `overloaded` or away: the run waits |
| 401, 402, 403, 404, 405, 407, 410, a redirect | `refused`: the run ends for all documents |
| all else: 408, 5xx, resets, timeouts, an error or no JSON in a 200 | `failure`, after more tries |
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal

from nmoe_core.labels.oracle import OracleResult

if TYPE_CHECKING:
    from nmoe_core.labels.oracles.connection import Connection

Kind = Literal["answer", "document", "overloaded", "refused", "failure"]
_OVERLOADED = (429, 503)
_REQUEST_TIMEOUT = 408
_REFUSED = (301, 302, 307, 308, 401, 402, 403, 404, 405, 407, 410)
_FAILURES = ("timeout", "connection_lost", "not_json", "error_reply", "reply_too_large")


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back: its kind, a status (0 where there is none), and the body as text.

    `reason` becomes the finish reason of a failed label; `value` is the object of an answer.
    """

    kind: Kind
    reason: str = ""
    text: str = ""
    status: int = 0
    value: dict[str, Any] = field(default_factory=dict)
    retry_after_s: float = 0.0


async def post(connection: Connection, body: bytes) -> Reply:
    """The reply to one request; what goes wrong on the way is a reply of status 0."""
    from nmoe_core.labels.oracles.connection import CannotConnectError, ReplyTooLargeError

    try:
        status, payload, headers = await connection.post(body)
    except CannotConnectError as error:
        return Reply("overloaded", f"cannot connect: {error}")
    except TimeoutError:
        return Reply("failure", "timeout")
    except ReplyTooLargeError as error:
        return Reply("failure", "reply_too_large", str(error))
    except OSError as error:
        return Reply("failure", "connection_lost", str(error))
    text = payload.decode(errors="replace")
    if status != 200:
        wait_s = retry_after_s(headers.get(b"retry-after", b"").decode("latin-1"))
        return Reply(_kind_of(status), f"http_{status}", text, status, retry_after_s=wait_s)
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        return Reply("failure", "not_json", text, status)
    # Gateways and some servers put their errors into a reply of status 200.
    if value.get("error") or value.get("object") == "error":
        return Reply("failure", "error_reply", text, status)
    return Reply("answer", status=status, value=value)


def _kind_of(status: int) -> Kind:
    if status in _OVERLOADED:
        return "overloaded"
    if status in _REFUSED:
        return "refused"
    return "document" if 400 <= status < 500 and status != _REQUEST_TIMEOUT else "failure"


def is_failure(result: OracleResult) -> bool:
    """Whether the server, not the model and not the document, is what failed."""
    if result.scores is not None:
        return False
    # A server may give an answer any finish reason, such as `http_error`.
    status = re.fullmatch(r"http_(\d{3})", result.finish_reason)
    if status is not None:
        return _kind_of(int(status[1])) != "document"
    return result.finish_reason in _FAILURES


def retry_after_s(value: str) -> float:
    """Seconds that a Retry-After header asks for: a number, or a date; 0 where there is none."""
    try:
        return min(max(0.0, float(value)), 1e9)
    except ValueError:
        pass
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    now = datetime.now(UTC)
    return max(0.0, (when.replace(tzinfo=when.tzinfo or UTC) - now).total_seconds())
