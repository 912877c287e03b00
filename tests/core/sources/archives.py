"""Web archives in tests, written by warcio."""

import io
from collections.abc import Sequence
from typing import Any

from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

WORDS = "a short note about rivers, hills and the weather of the north. "
MENU = '<nav><ul><li><a href="/">Home</a></li><li><a href="/a">About</a></li></ul></nav>'


def text_of(number: int) -> str:
    """The main text of a page."""
    return f"Note {number}: {WORDS * 6}".strip()


def page(number: int, head: str = '<meta charset="utf-8">') -> bytes:
    """A page with a menu, its text, and a footer."""
    main = f"<main><p>{text_of(number)}</p></main>"
    footer = "<footer>Copyright of the site</footer>"
    return f"<html><head>{head}</head><body>{MENU}{main}{footer}</body></html>".encode()


def response(url: str, body: bytes, **how: Any) -> dict[str, Any]:
    """A response for `archive`; `status`, `headers` and `more` (headers of the record) differ."""
    headers = how.get("headers", [("Content-Type", "text/html")])
    status = StatusAndHeaders(how.get("status", "200 OK"), headers, protocol="HTTP/1.1")
    more = {"warc_headers_dict": how["more"]} if "more" in how else {}
    return {"uri": url, "record_type": "response", "payload": body, "http_headers": status, **more}


def conversion(url: str, text: bytes) -> dict[str, Any]:
    """A conversion for `archive`."""
    kind = {"record_type": "conversion", "warc_content_type": "text/plain"}
    return {"uri": url, "payload": text, **kind}


def archive(records: Sequence[dict[str, Any]], *, gzip: bool = False) -> bytes:
    """An archive of a warcinfo record and these records, as warcio writes it."""
    written = io.BytesIO()
    writer = WARCWriter(written, gzip=gzip)
    made = [writer.create_warcinfo_record("a.warc", {"software": "warcio"})]
    for record in records:
        payload = io.BytesIO(record["payload"])
        made.append(writer.create_warc_record(**record | {"payload": payload}))
    for one in made:
        writer.write_record(one)
        one.raw_stream.close()
    return written.getvalue()
