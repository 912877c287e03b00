"""`python -m benchmarks.extraction DIRECTORY...`: main text of HTML pages, by extractor.

The pages are built from the Markdown files below the directories, so their main text is known. Half
of the styles are themes of mkdocs, with all their navigation; the others are a news page and a
forum thread, with related articles, a cookie banner, comments and a footer. Precision, recall and
F1 compare the multisets of words; figures are means over pages. `resiliparse` is the library alone,
`kind html` what a source does with it. trafilatura is measured if it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import markdown
from mkdocs.commands.build import build
from mkdocs.config import load_config

from benchmarks.rounds import cpu_seconds
from nmoe_core.cli.output import print_table
from nmoe_core.sources.records import Reading
from nmoe_core.sources.web.pages import page_of

THEMES = ("material", "mkdocs", "readthedocs")
_WORD = re.compile(r"\w+")
_TAG = re.compile(r"(?s)<(script|style)\b.*?</\1>|<!--.*?-->|<[^>]*>")
_LEAST_WORDS = 150
NEWS = """<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">
<title>{title} | The Daily</title><style>.a {{ color: red }}</style>
<script>var tracked = "{title}";</script></head><body>
<div id="cookie-consent" role="dialog"><p>We value your privacy. We and our 842 partners use cookies
to store and access information on your device.</p><button>Accept all</button></div>
<header><a href="/">The Daily</a><nav><ul>{menu}</ul></nav></header>
<main><article><h1>{title}</h1>{main}</article></main>
<aside><h2>Most read</h2><ul>{others}</ul><form><label>Sign up to our newsletter</label>
<input type="email"></form></aside>
<footer><p>Copyright 2026 The Daily. All rights reserved.</p><ul>{menu}</ul></footer>
</body></html>"""
FORUM = """<!DOCTYPE html><html><head><meta charset="utf-8"><title>{title}</title></head><body>
<div class="topbar"><div class="menu">{menu}</div><div class="search">Search the board</div></div>
<div class="crumbs"><a href="/">Home</a> &gt; <a href="/b">Board</a> &gt; {title}</div>
<div class="wrap"><div class="post"><div class="body"><h2>{title}</h2>{main}</div></div>
<div class="sidebar"><div>Related threads</div><ul>{others}</ul></div></div>
<div class="bottom">Powered by BoardSoft 4.1 <a href="/terms">Terms</a> <a href="/p">Privacy</a>
<ul>{menu}</ul></div></body></html>"""


class Page(NamedTuple):
    """A page and the words of its main text."""

    style: str
    payload: str
    words: Counter[str]


def pages_of(directories: list[Path], most: int, work: Path) -> list[Page]:
    """The pages of up to `most` Markdown files in each style."""
    found = sorted(path for top in directories for path in top.rglob("*.md"))
    random.Random(7).shuffle(found)
    texts: dict[str, str] = {}
    for path in found:
        text = path.read_text("utf-8", "replace")
        if len(_WORD.findall(text)) >= _LEAST_WORDS and "{{" not in text:
            texts[f"page_{len(texts)}"] = text.removeprefix("\ufeff")
        if len(texts) == most:
            break
    mains = {name: _converted(text) for name, text in texts.items()}
    words = {name: _words(_TAG.sub(" ", main)) for name, main in mains.items()}
    pages = [
        Page(style, form.format(main=main, **around(name, list(texts))), words[name])
        for style, form in (("news", NEWS), ("forum", FORUM))
        for name, main in mains.items()
    ]
    source = work / "docs"
    source.mkdir()
    for name, text in texts.items():
        (source / f"{name}.md").write_text(text)
    for theme in THEMES:
        pages += [Page(theme, page, words[name]) for name, page in _site(source, theme, work)]
    return pages


def _converted(text: str) -> str:
    return markdown.markdown(text, extensions=["tables", "toc", "fenced_code"])


def _site(source: Path, theme: str, work: Path) -> Iterator[tuple[str, str]]:
    """The pages of a site of mkdocs, by name."""
    site = work / theme
    settings = {
        "site_name": "Documentation",
        "docs_dir": str(source),
        "site_dir": str(site),
        "copyright": "Copyright 2026 The authors",
        "theme": {"name": theme, **({"font": False} if theme == "material" else {})},
        "plugins": [],
        "markdown_extensions": ["tables", "toc", "fenced_code"],
        "validation": {"links": {"not_found": "ignore", "unrecognized_links": "ignore"}},
    }
    path = work / f"{theme}.yml"
    path.write_text("site_name: Documentation\n")
    config = load_config(str(path), **settings)
    build(config)
    for page in sorted(site.glob("page_*/index.html")):
        yield page.parent.name, page.read_text("utf-8")


def around(name: str, names: list[str]) -> dict[str, str]:
    """What surrounds a page's main text."""
    rng = random.Random(name)
    titles = [
        f"Why {one.replace('_', ' ')} surprised readers in {rng.choice('NSEW')}" for one in names
    ]
    links = [f'<li><a href="/{i}">{html.escape(title)}</a></li>' for i, title in enumerate(titles)]
    sections = ("World", "Business", "Opinion", "Sports", "Culture", "Weather", "Sign in")
    menu = "".join(f'<li><a href="/{one}">{one}</a></li>' for one in sections)
    others = "".join(rng.sample(links, min(12, len(links))))
    return {"title": name.replace("_", " "), "menu": menu, "others": others}


def _words(text: str) -> Counter[str]:
    return Counter(_WORD.findall(html.unescape(text).lower()))


def extractors() -> dict[str, Callable[[str], str]]:
    """The extractors that are installed, with their version."""
    from resiliparse.extract.html2text import extract_plain_text

    reading = Reading("pages")
    found: dict[str, Callable[[str], str]] = {
        "all text": lambda page: extract_plain_text(page),
        f"resiliparse {version('resiliparse')}": lambda page: extract_plain_text(
            page, main_content=True, alt_texts=False
        ),
        "kind html": lambda page: page_of(page.encode(), None, reading, "page").text,
    }
    if find_spec("trafilatura"):
        import trafilatura

        name = f"trafilatura {trafilatura.__version__}"
        found[name] = lambda page: trafilatura.extract(page) or ""
        found[f"{name}, fast"] = lambda page: trafilatura.extract(page, fast=True) or ""
    return found


def scores(page: Page, text: str) -> tuple[float, float, float]:
    """Precision, recall and F1 of a text's words."""
    found = _words(text)
    shared = sum((found & page.words).values())
    precision = shared / max(sum(found.values()), 1)
    recall = shared / max(sum(page.words.values()), 1)
    return precision, recall, 2 * precision * recall / max(precision + recall, 1e-9)


def main() -> None:
    """Print a row per extractor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--most", type=int, default=100, help="Markdown files (default 100)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work, contextlib.redirect_stderr(None):
        pages = pages_of(arguments.directories, arguments.most, Path(work))
    size_mb = sum(len(page.payload.encode()) for page in pages) / 1e6
    styles = list(dict.fromkeys(page.style for page in pages))
    rows = []
    for name, extract in extractors().items():
        texts: list[str] = []
        seconds = cpu_seconds(lambda e=extract, t=texts: t.extend(e(p.payload) for p in pages))
        of_pages = [scores(page, text) for page, text in zip(pages, texts)]
        means = [f"{mean(values):.3f}" for values in zip(*of_pages)]
        least = sum(f1 < 0.5 for _, _, f1 in of_pages) / len(pages)
        by_style = [
            f"{mean(s[2] for p, s in zip(pages, of_pages) if p.style == one):.3f}" for one in styles
        ]
        rows.append([name, f"{size_mb / seconds:.1f}", *means, f"{least:.1%}", *by_style])
    print(f"{len(pages)} pages, {size_mb:.1f} MB")
    header = ["extractor", "MB/cpu s", "precision", "recall", "F1", "F1 < .5"]
    print_table([*header, *(f"F1 {style}" for style in styles)], rows)


if __name__ == "__main__":
    main()
