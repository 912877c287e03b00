"""`python -m benchmarks.web_corpus DIRECTORY...`: a web archive with planted faults, through a run.

The texts are the paragraphs of Markdown files below the directories, as pages of sites. What is
planted is known: addresses and keys, boilerplate of sites, copies, pages inside longer pages,
passages, items of an evaluation, and pages in five scripts. The run reads the archive as `warc`,
with the transforms `lines` and `redact`, and the table says how much of each was
found, and in how many other pages. Those others are not all wrong: the texts have addresses of
their own, and both forms of pages have lines that all their pages share. A second run cuts what the
first one only marks, with `paragraphs` and `passages`. `--keep DIRECTORY` keeps the projects.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import html
import io
import json
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.extraction import FORUM, NEWS, around
from nmoe_core.cli import main as nmoe
from nmoe_core.cli.output import print_table
from nmoe_core.config.run import Run
from nmoe_core.tasks.selection.query import query

_PARAGRAPH = re.compile(r"\n\s*\n")
_SCRIPTS = {
    "Latin": "the old river town market opens early with bread cheese fruit and warm milk",
    "Cyrillic": "старый город утром рынок открывает рано свежий хлеб сыр молоко тёплый река мост",
    "Arabic": "المدينة القديمة تفتح السوق باكرا مع الخبز والجبن والفاكهة والحليب الدافئ قرب النهر",
    "Devanagari": "पुराना शहर सुबह बाज़ार जल्दी खुलता है ताज़ी रोटी पनीर फल और गरम दूध नदी",
    "Han": "古老 河边 小镇 早晨 市场 开门 面包 奶酪 水果 牛奶 温暖 桥梁 人们 走路",
}
_END = {"Devanagari": "।", "Han": "。"}
_LANGUAGES = {"Latin": "en", "Cyrillic": "ru", "Arabic": "ar", "Devanagari": "hi", "Han": "zh"}
_MARKED = """
[[transforms]]
kind = "lines"
boilerplate_documents = 10
site_column = "domain"

[[transforms]]
kind = "redact"
regions = ["US", "DE"]
"""
_CUT = """
[[transforms]]
kind = "paragraphs"
min_chars = 200

[[transforms]]
kind = "passages"
min_words = 50
"""


@dataclass
class Page:
    """A page: its paragraphs, and what was planted in it."""

    site: str
    name: str
    paragraphs: list[str]
    planted: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"https://{self.site}/{self.name}"


def texts_of(directories: list[Path], most: int) -> list[list[str]]:
    """Prose paragraphs of Markdown files, each file once."""
    found_files = (path for top in directories for path in top.rglob("*.md"))
    files = sorted(path for path in found_files if path.is_file())
    random.Random(7).shuffle(files)
    found: dict[str, list[str]] = {}
    for path in files:
        parts = _PARAGRAPH.split(path.read_text("utf-8", "replace"))
        prose = [" ".join(part.split()) for part in parts]
        prose = [one for one in prose if len(one) > 150 and one[0].isalpha() and "|" not in one]
        if len(prose) >= 4:
            found.setdefault(prose[0], prose[:12])
        if len(found) == most:
            break
    return list(found.values())


def plant(texts: list[list[str]], seed: int) -> tuple[list[Page], dict[str, list[str]]]:
    """The pages of a corpus, and the strings that were planted by kind."""
    rng = random.Random(seed)
    num_sites = max(2, len(texts) // 25)
    pages = [
        Page(f"site{k % num_sites}.example-host.net", f"p{k}", list(one))
        for k, one in enumerate(texts)
    ]
    strings: dict[str, list[str]] = {"address": [], "boilerplate": [], "evaluation": []}
    for site in {page.site for page in pages}:
        line = f"Thank you for reading {site}, and tell your friends what they miss every week."
        strings["boilerplate"].append(line)
        for page in (page for page in pages if page.site == site):
            page.paragraphs.append(line)
    free = iter(rng.sample(pages, len(pages)))
    for k in range(len(pages) // 10):
        page = next(free)
        secret = _secret(rng, k)
        at = rng.randrange(len(page.paragraphs) - 1)
        page.paragraphs[at] += f" Write to {secret} if something is missing."
        page.planted["address"] = secret
        strings["address"].append(secret)
    for k in range(20):
        page = next(free)
        words = " ".join(rng.choice(_SCRIPTS["Latin"].split()) for _ in range(16))
        item = f"Question {k} of the village quiz asks {words}?"
        page.paragraphs.insert(1, item)
        page.planted["evaluation"] = item
        strings["evaluation"].append(item)
    passage = " ".join(rng.choice(_SCRIPTS["Latin"].split()) for _ in range(90)) + "."
    for k in range(10):
        page = next(free)
        page.paragraphs.insert(1, f"Note {k}: {passage}" if k % 2 else passage)
        page.planted["passage"] = passage
    added: list[Page] = []
    for k in range(len(pages) // 20):
        page = next(free)
        added.append(Page("mirror.example-host.org", f"copy{k}", list(page.paragraphs)))
        added[-1].planted["copy"] = page.url
    for k in range(10):
        page = next(free)
        around = next(free)
        longer = [*around.paragraphs[:-1], *page.paragraphs[:-1]]
        added.append(Page("longer.example-host.org", f"long{k}", longer))
        page.planted["contained"] = added[-1].url
    for script, words in _SCRIPTS.items():
        for k in range(10):
            added.append(Page("world.example-host.org", f"{script}{k}", _prose(script, words, rng)))
            added[-1].planted["script"] = script
    pages += added
    rng.shuffle(pages)
    return pages, strings


def _secret(rng: random.Random, k: int) -> str:
    name = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(8))
    return (
        f"{name}@mail-{name[:4]}.com",
        f"+49 30 {rng.randrange(2_000_000, 9_000_000)}",
        f"93.184.{rng.randrange(100, 255)}.{rng.randrange(100, 255)}",
        "ghp_" + "".join(rng.choice("abcdefghijkLMNOPQRSTUV0123456789") for _ in range(36)),
    )[k % 4]


def _prose(script: str, words: str, rng: random.Random) -> list[str]:
    """Four paragraphs of sentences in a script."""
    parts = words.split()
    joint = "" if script == "Han" else " "
    found = []
    for _ in range(4):
        sentences = [joint.join(rng.choices(parts, k=12)) + _END.get(script, ".") for _ in range(4)]
        found.append(joint.join(sentences))
    return found


def write_warc(path: Path, pages: list[Page]) -> None:
    """A web archive with one `response` record per page, each in a gzip member of its own."""
    names = [page.name for page in pages]
    with open(path, "wb") as file:
        for k, page in enumerate(pages):
            main = "".join(f"<p>{html.escape(one)}</p>" for one in page.paragraphs)
            form = NEWS if k % 2 else FORUM
            body = form.format(main=main, **around(page.name, names[:40])).encode()
            head = "HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n"
            http = head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
            fields = (
                "WARC/1.1",
                "WARC-Type: response",
                f"WARC-Record-ID: <urn:uuid:00000000-0000-4000-8000-{k:012x}>",
                f"WARC-Target-URI: {page.url}",
                "WARC-Date: 2026-01-01T00:00:00Z",
                "Content-Type: application/http; msgtype=response",
                f"Content-Length: {len(http)}",
            )
            record = "\r\n".join(fields).encode() + b"\r\n\r\n" + http + b"\r\n\r\n"
            file.write(gzip.compress(record, 6, mtime=0))


def write_project(
    directory: Path, pages: list[Page], strings: dict[str, list[str]], transforms: str
) -> Path:
    """A run over the archive; returns its configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    write_warc(directory / "crawl.warc.gz", pages)
    rows = "".join(json.dumps({"question": one}) + "\n" for one in strings["evaluation"])
    (directory / "quiz.jsonl").write_text(rows)
    (directory / "mixture.toml").write_text(
        '[[mixtures.web.sources]]\nid = "crawl"\ntokens_b = 0.0001\nkind = "warc"\n'
        'paths = ["crawl.warc.gz"]\ncolumns = ["url", "domain"]\n'
    )
    (directory / "flows.toml").write_text(
        '[flow.web]\nmode = "web"\nstages = ["pretrain"]\n[flow.web.mixture]\npretrain = "web"\n'
    )
    config = directory / "run.toml"
    config.write_text(
        'root = "out"\nmixture_toml = "mixture.toml"\nflow_profiles_toml = "flows.toml"\n'
        'flow_mode = "web"\nseq_len = 512\nbatch_size = 2\n'
        "[prep]\nnum_shards = 4\n"
        f'max_tokens = "all"\n{transforms}\n'
        '[attributes]\nuse = ["signals", "language", "duplicates", "contamination"]\n'
        "[duplicates]\ncontained = 0.7\nrepeated_tokens = 50\n"
        '[contamination]\nevaluations = {quiz = "quiz.jsonl"}\n'
        '[grading]\ngrader = "none"\n'
    )
    return config


def table_of(run: Run, pages: list[Page], strings: dict[str, list[str]]) -> Iterator[list[Any]]:
    """A row per kind: pages in which it was planted, pages in which it was found, and other pages
    in which it was seen."""
    answer = query(
        run,
        "select url, exact_of, near_of, contained_in, contamination, lang, repeated_share, changes "
        "from documents",
    )
    rows = {row[0]: dict(zip(answer.columns, row)) for row in answer.rows}
    read = [page for page in pages if page.url in rows]
    yield ["read from the archive", len(pages), len(read), 0]
    removed = {url: _removed(row) for url, row in rows.items()}
    secrets = " ".join(strings["address"])
    hits = [
        page for page in read if page.planted.get("address") in removed[page.url].get("redact", ())
    ]
    taken = [
        text for one in removed.values() for text in one.get("redact", ()) if text not in secrets
    ]
    yield ["address or key, removed", _count(pages, "address"), len(hits), len(taken)]
    own = {page.url: page.paragraphs[-1] for page in read if page.site.startswith("site")}
    lost = [text for one in removed.values() for text in one.get("lines", ())]
    known = set(strings["boilerplate"])
    hits = [url for url, line in own.items() if line in removed[url].get("lines", ())]
    others = [text for text in lost if text not in known]
    yield ["boilerplate of a site, removed", len(own), len(hits), len(others)]
    yield _flagged(read, rows, "copy", lambda row: bool(row["exact_of"] or row["near_of"]))
    yield _flagged(read, rows, "contained", lambda row: bool(row["contained_in"]))
    yield _flagged(read, rows, "evaluation", lambda row: row["contamination"] > 0)
    yield _flagged(read, rows, "passage", lambda row: (row["repeated_share"] or 0) > 0)
    scripts = [page for page in read if "script" in page.planted]
    right = [
        page for page in scripts if rows[page.url]["lang"] == _LANGUAGES[page.planted["script"]]
    ]
    yield ["language of five scripts", _count(pages, "script"), len(right), 0]


def cut_of(run: Run, pages: list[Page]) -> Iterator[list[Any]]:
    """A row per kind of repeated text: its pages, those of which nothing is left, and the share of
    the pages' text that was cut."""
    answer = query(run, "select url, n_chars, chars_removed from documents")
    rows = {url: (size, removed or 0) for url, size, removed in answer.rows}
    for kind in ("copy", "contained", "passage"):
        planted = [page for page in pages if kind in page.planted]
        left = [rows[page.url] for page in planted if page.url in rows]
        # A page of which nothing is left is no document.
        gone = sum(len("".join(page.paragraphs)) for page in planted if page.url not in rows)
        removed = gone + sum(one for _, one in left)
        share = removed / max(removed + sum(size for size, _ in left), 1)
        yield [kind, len(planted), len(planted) - len(left), f"{share:.0%}"]


def _removed(row: dict[str, Any]) -> dict[str, list[str]]:
    """What each transform removed from a page, without white space around it."""
    found: dict[str, list[str]] = {}
    for change in row["changes"] or ():
        found.setdefault(change["transform"], []).append(str(change["removed"]).strip())
    return found


def _count(pages: list[Page], kind: str) -> int:
    return sum(kind in page.planted for page in pages)


def _flagged(
    read: list[Page],
    rows: dict[str, dict[str, Any]],
    kind: str,
    is_found: Callable[[dict[str, Any]], bool],
) -> list[Any]:
    found = {page.url for page in read if is_found(rows[page.url])}
    planted = {page.url: page.planted[kind] for page in read if kind in page.planted}
    # Of two copies, either one may be the one that is kept.
    hits = [one for one in planted if one in found or (kind == "copy" and planted[one] in found)]
    own = {*planted, *planted.values()} if kind == "copy" else {*planted}
    return [kind, len(planted), len(hits), len(found - own)]


def main() -> None:
    """Make the corpus, run, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--most", type=int, default=600, help="Markdown files (default 600)")
    parser.add_argument("--keep", type=Path, help="keep the project in this directory")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.keep or Path(temporary)
        pages, strings = plant(texts_of(arguments.directories, arguments.most), seed=1)
        marked = _made(directory / "marked", pages, strings, _MARKED)
        rows = [*table_of(marked, pages, strings)]
        cut = [*cut_of(_made(directory / "cut", pages, strings, _MARKED + _CUT), pages)]
        print_table(["planted", "pages", "found", "others"], rows)
        print()
        print_table(["cut", "pages", "nothing left", "of their text"], cut)


def _made(
    directory: Path, pages: list[Page], strings: dict[str, list[str]], transforms: str
) -> Run:
    config = write_project(directory, pages, strings, transforms)
    with contextlib.redirect_stdout(io.StringIO()):
        for verb in ("prep-mixture", "attributes"):
            if nmoe([verb, "--config", str(config), "--quiet"]):
                raise SystemExit(1)
    return Run(config)


if __name__ == "__main__":
    main()
