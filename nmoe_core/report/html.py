"""HTML from Python values: every text is escaped, except instances of `Html`."""

import html
import re
from collections.abc import Iterable, Sequence
from importlib import resources

from nmoe_core.base.errors import printable

_PICTURE = re.compile(r"!\[((?:(?!!\[)[^\]])*)\]\((data:image/png;base64,[A-Za-z0-9+/=]+)\)")
# With this policy, browsers run no script and fetch no URL, whatever text a document contains.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'"


class Html(str):
    """Text that is already HTML."""

    __slots__ = ()


def escaped(value: object) -> Html:
    """A value as HTML: numbers with thousands separators, None as empty. Texts are `printable`."""
    if isinstance(value, Html):
        return value
    if value is None:
        return Html()
    if isinstance(value, bool):
        return Html("yes" if value else "no")
    if isinstance(value, float):
        return Html(f"{value:,.3f}")
    if isinstance(value, int):
        return Html(f"{value:,}")
    return Html(html.escape(printable(str(value))))


def joined(parts: Iterable[object]) -> Html:
    """The concatenated parts."""
    return Html("".join(map(escaped, parts)))


def element(name: str, *content: object, **attributes: object) -> Html:
    """`<name attribute="...">content</name>`; `kind` is the attribute `class`."""
    named = {"class" if k == "kind" else k: v for k, v in attributes.items()}
    given = "".join(f' {k}="{escaped(v)}"' for k, v in named.items())
    return Html(f"<{name}{given}>{joined(content)}</{name}>")


def paragraph(*content: object) -> Html:
    return element("p", *content)


def note(*content: object) -> Html:
    """A line that says why content is missing, or a remark."""
    return element("p", *content, kind="note")


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> Html:
    """A table that scrolls if it is too wide; numbers are aligned right."""
    head = element("tr", *(element("th", name) for name in header))
    body = joined(element("tr", *map(_cell, row)) for row in rows)
    whole = element("table", element("thead", head), element("tbody", body))
    return element("div", whole, kind="wide")


def _cell(value: object) -> Html:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return element("td", value, kind="number") if is_number else element("td", value)


def pictures(markdown: str) -> Html:
    """The inline pictures of Markdown metadata, as HTML figures."""
    found = _PICTURE.findall(markdown)
    return joined(
        element("figure", Html(f'<img src="{data}" alt="{escaped(alt)}" loading="lazy">'))
        for alt, data in found
    )


def page(title: str, head: Html, sections: Sequence[tuple[str, str, Html]]) -> str:
    """A complete HTML document; each section has an anchor, a title and content."""
    style = resources.files("nmoe_core.report").joinpath("page.css").read_text("utf-8")
    links = (element("a", name, href=f"#{anchor}") for anchor, name, _ in sections)
    body = joined(
        element("section", element("h2", name), content, id=anchor)
        for anchor, name, content in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(_POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escaped(title)}</title><style>{style}</style></head><body>"
        f"<header>{head}{element('nav', *links)}</header><main>{body}</main></body></html>\n"
    )
