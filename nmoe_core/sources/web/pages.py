"""From the bytes of an HTML page to its main text.

The encoding is what the page declares: a byte order mark, else the HTTP header, else a `meta` tag
in its first 1,024 bytes; else the encoding of the source, by default UTF-8. Bytes are decoded
strictly. The main text, without navigation, banners and footers, is extracted by resiliparse.
"""

import re
from typing import NamedTuple

from nmoe_core.base.jsonl import marked_encoding
from nmoe_core.sources.forms.encoding import canonical, encoding_of, missing_extra, version_of
from nmoe_core.sources.records import Reading

MAX_PAGE_BYTES = 16 * 2**20
_HEAD_BYTES = 1024
_META = re.compile(r"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_:.-]{1,40})", re.I)
_DIVISION = re.compile(r"<(/?)(?:div|article)\b", re.I)
# The time of an extraction grows with the square of the depth of these.
_MOST_DEPTH = 256
_NO_INDEX = {"noindex", "none", "noai"}
_METHOD = 1  # counts changes of this module that change texts


class Page(NamedTuple):
    """The main text of a page."""

    text: str
    is_replaced: bool
    """Whether bytes that are not of the page's encoding were replaced."""
    encoding: str
    asks_not_to_be_indexed: bool


def extraction() -> str:
    """Name and version of the extraction, as fingerprints record it."""
    return f"{version_of('resiliparse')}, method {_METHOD}"


def page_of(payload: bytes, charset: str | None, reading: Reading, where: str) -> Page:
    """The main text of a page.

    Args:
        payload: The page, at most MAX_PAGE_BYTES.
        charset: The encoding that the HTTP header declares.
        reading: Says which encoding a page has that declares none, and whether to replace bytes.
        where: The page, for errors.

    Raises:
        UnicodeDecodeError: Bytes do not belong to the page's encoding.
        ValueError: The page is nested too deep.
        SourceError: No encoding fits (E-SOURCE-ENCODING), or the packages for pages are not
            installed (E-SOURCE-EXTRA).
    """
    try:
        from resiliparse.extract.html2text import extract_plain_text
        from resiliparse.parse.html import HTMLTree
    except ImportError as error:
        raise missing_extra("HTML", where) from error
    encoding = _declared(payload, charset) or encoding_of(payload, reading.encoding, where)
    is_replaced = False
    try:
        text = payload.decode(encoding)
    except UnicodeDecodeError:
        if reading.on_error != "replace":
            raise
        text = payload.decode(encoding, "replace")
        is_replaced = True
    if _depth(text) > _MOST_DEPTH:
        raise ValueError(f"elements are nested more than {_MOST_DEPTH} deep")
    # Some decoders of Python give lone surrogates.
    tree = HTMLTree.parse(text.removeprefix("\ufeff").encode("utf-8", "replace").decode())
    body = tree.body
    if body is None:
        return Page("", is_replaced, encoding, False)
    robots = tree.head.query_selector("meta[name=robots i]") if tree.head else None
    is_closed = robots is not None and asks_not_to_be_indexed(robots.getattr("content") or "")
    # The library takes lists near the root for menus, so the page is moved down by two elements.
    outer = tree.create_element("div")
    inner = tree.create_element("div")
    if outer is not None and inner is not None:
        # the library's list of all children takes time that grows with their square
        while (child := body.first_child) is not None:
            inner.append_child(child)
        outer.append_child(inner)
        body.append_child(outer)
    main = extract_plain_text(tree, main_content=True, alt_texts=False)
    return Page(main, is_replaced, encoding, is_closed)


def asks_not_to_be_indexed(robots: str) -> bool:
    """Whether the value of a `robots` tag or header asks that the page is not used."""
    return not _NO_INDEX.isdisjoint(part.strip().lower() for part in robots.split(","))


def _declared(payload: bytes, charset: str | None) -> str | None:
    """The encoding that a page declares, by the labels of the HTML standard; None if it declares
    none that is known."""
    from resiliparse.parse.encoding import map_encoding_to_html5

    marked = marked_encoding(payload)
    if marked != "utf-8" or payload.startswith(b"\xef\xbb\xbf"):
        return marked
    found = _META.search(payload[:_HEAD_BYTES].decode("latin-1"))
    of_meta = found[1] if found else None
    for label in (charset, of_meta):
        known = label and map_encoding_to_html5(label.strip("\"' "), fallback_utf8=False)
        if known:
            try:
                encoding = canonical(known)
            except ValueError:
                continue
            # a page whose tag could be read is not in UTF-16
            return "utf-8" if label is of_meta and encoding.startswith("utf-16") else encoding
    return None


def _depth(text: str) -> int:
    """Upper bound of the depth to which divisions are nested."""
    deepest = depth = 0
    for found in _DIVISION.finditer(text):
        depth = max(0, depth - 1) if found[1] else depth + 1
        deepest = max(deepest, depth)
    return deepest
