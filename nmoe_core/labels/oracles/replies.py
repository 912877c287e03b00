"""What a server's reply means: an answer, a refusal of the document, or a failure of the server.

| reply | meaning |
|---|---|
| 200 with a JSON object that is not an error | an answer |
| 400, 413, 422 and any other 4xx not named below | this document's failed label |
| 429, 503, no connection | overloaded or away: the run waits |
| 401, 402, 403, 404, 405, 407, 410, a redirect | the run ends: no document would fare better |
| all else: 408, 5xx, resets, timeouts, an error or no JSON in a 200 | tried again, then a failure |
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from nmoe_core.labels.oracle import OracleResult

if TYPE_CHECKING:
    from nmoe_core.labels.oracles.connection import Connection

_OVERLOADED = (429, 503)
_REQUEST_TIMEOUT = 408
_REFUSED_FOR_GOOD = (301, 302, 307, 308, 401, 402, 403, 404, 405, 407, 410)
_FAILURES = ("timeout", "connection_lost", "not_json", "error_reply", "reply_too_large")


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back: a status and bytes, or status 0 and why there is none.

    `value` is the JSON object of an answer, and None of all else.
    """

    status: int
    body: bytes = b""
    reason: str = ""
    value: dict[str, Any] | None = None
    is_unreachable: bool = False
    retry_after_s: float = 0.0

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode(errors="replace")

    @property
    def is_overloaded(self) -> bool:
        """Whether the server takes no request now."""
        return self.is_unreachable or self.status in _OVERLOADED

    @property
    def is_refused_for_good(self) -> bool:
        """Whether no request of this run would be taken."""
        return self.status in _REFUSED_FOR_GOOD

    @property
    def is_about_document(self) -> bool:
        """Whether the server has refused this document, and would again."""
        return _is_about_document(self.status)


def _is_about_document(status: int) -> bool:
    not_about_it = (*_OVERLOADED, *_REFUSED_FOR_GOOD, _REQUEST_TIMEOUT)
    return 400 <= status < 500 and status not in not_about_it


async def post(connection: Connection, body: bytes) -> Reply:
    """The reply to one request; what goes wrong on the way is a reply of status 0."""
    from nmoe_core.labels.oracles.connection import CannotConnectError, ReplyTooLargeError

    try:
        status, payload, headers = await connection.post(body)
    except CannotConnectError as error:
        return Reply(0, reason=f"cannot connect: {error}", is_unreachable=True)
    except TimeoutError:
        return Reply(0, reason="timeout")
    except ReplyTooLargeError as error:
        return Reply(0, str(error).encode(), reason="reply_too_large")
    except OSError as error:
        return Reply(0, str(error).encode(), reason="connection_lost")
    wait_s = retry_after_s(headers.get(b"retry-after", b"").decode("latin-1"))
    if status != 200:
        return Reply(status, payload, f"http_{status}", retry_after_s=wait_s)
    value = _json_object(payload)
    if value is None:
        return Reply(status, payload, "not_json")
    # Gateways and some servers put their errors into a reply of status 200.
    if value.get("error") or value.get("object") == "error":
        return Reply(status, payload, "error_reply")
    return Reply(status, payload, value=value)


def is_failure(result: OracleResult) -> bool:
    """Whether the server, not the model and not the document, is what failed."""
    if result.scores is not None:
        return False
    # A server may give an answer any finish reason, such as `http_error`.
    status = re.fullmatch(r"http_(\d{3})", result.finish_reason)
    if status is not None:
        return not _is_about_document(int(status[1]))
    return result.finish_reason in _FAILURES


def retry_after_s(value: str) -> float:
    """Seconds that a Retry-After header asks for: a number, or a date; 0 where there is none."""
    if not value:
        return 0.0
    try:
        return min(max(0.0, float(value)), 1e9)
    except ValueError:
        pass
    from datetime import datetime

    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    now = datetime.now(UTC)
    return max(0.0, (when.replace(tzinfo=when.tzinfo or UTC) - now).total_seconds())


def _json_object(body: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
