"""Hooks of the documentation site: pages made from the code, and links out of the site."""

import re
import runpy
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

HERE = Path(__file__).parent
MADE_PAGES = ("api", "commands", "configuration", "dependencies", "errors")
_LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([^)]+)\)")


def on_files(files: Any, *, config: Any) -> None:
    """Add the pages that are made from the code; the repository does not contain them."""
    for name in MADE_PAGES:
        made = runpy.run_path(str(HERE / f"make_{name}.py"))["page"]()
        files.append(File.generated(config, f"{name}.md", content=made))


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page without links out of the site; in the repository they lead to the files."""
    depth = page.file.src_uri.count("/")

    def shown(link: re.Match[str]) -> str:
        if link[0].count("../") <= depth:
            return link[0]
        return link[1] if link[1] == link[2] else f"{link[1]} (`{link[2]}`)"

    return _LINK.sub(shown, markdown)
