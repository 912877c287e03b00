"""Hooks of the documentation site: links to files outside `docs` become their paths."""

import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([^)]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page with no link that leaves the site; in a repository they lead to the files."""
    depth = page.file.src_uri.count("/")

    def shown(link: re.Match[str]) -> str:
        if link[0].count("../") <= depth:
            return link[0]
        return link[1] if link[1] == link[2] else f"{link[1]} (`{link[2]}`)"

    return _LINK.sub(shown, markdown)
