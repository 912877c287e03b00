"""A corpus of real documents with planted copies, questions, addresses and boilerplate.

The same directory and seed give the same corpus. The documents themselves have no copies among
them: the copies that are found in the corpora are left out first.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from nmoe_core.attributes.copies.duplicates import Shard, resolve
from nmoe_core.attributes.minhash import Signatures, signatures, unpack
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.records import Reading, Record
from nmoe_core.sources.storage import SourceFile

PER_KIND = 100
MIRROR = "mirror"  # the source of copies across sources, and the last in priority
_MAX_CHARS, _MAX_DOCUMENTS, _LEAST_CHARS = 8000, 1500, 200
Edit = Callable[[str], str]
_EDITS = (0.01, 0.02, 0.05, 0.10)
_MENU = ("Home", "Accept all cookies", "Share on social media", "Subscribe to our newsletter")


class Document(NamedTuple):
    """A text of the corpus; `of` is the document that it is a copy of, `kind` what was planted."""

    source: str
    ingest_id: str
    text: str
    kind: str = ""
    of: str = ""

    @property
    def name(self) -> str:
        return f"{self.source}//{self.ingest_id}"


@dataclass(frozen=True)
class Planted:
    """The documents, and the questions of the evaluation that some of them hold."""

    documents: list[Document]
    questions: list[str]
    priority: list[str]


def plant(directory: Path, seed: int) -> Planted:
    """Mix the corpus. `directory` has one JSONL file per source."""
    rng = random.Random(seed)
    sources = {
        Path(file.path).name.split(".")[0]: _texts(file)
        for file in find_files(["*.jsonl*"], directory)
    }
    asked = [text for text in sources.pop("math_word_problems") if len(text.split()) >= 26]
    questions = [" ".join(text.split()[:26]) for text in rng.sample(asked, PER_KIND)]
    base = [
        Document(source, f"d{number:06d}", text)
        for source, texts in sources.items()
        for number, text in enumerate(rng.sample(texts, min(len(texts), _MAX_DOCUMENTS)))
    ]
    survivors = [row["is_survivor"] for row in duplicates(base, list(sources))]
    base = [document for document, is_one in zip(base, survivors) if is_one]
    chinese = [one for one in base if one.source == "poetry_chinese"]
    spaced = [one for one in base if one.source != "poetry_chinese" and len(one.text) > 1000]
    rng.shuffle(chinese)
    rng.shuffle(spaced)
    taken, chinese_taken = iter(spaced), iter(chinese)
    made = [
        *_copies("exact copy", taken, lambda text: text),
        *_copies("exact copy, other source", taken, lambda text: text, MIRROR),
        *_copies("case and spaces changed", taken, lambda text: text.lower().replace(" ", "  ")),
    ]
    words = sorted({word for one in spaced[:200] for word in one.text.split()})
    for share in _EDITS:
        made += _copies(f"{share:.0%} of words edited", taken, _word_editor(share, words, rng))
    made += _copies("1% edited, other source", taken, _word_editor(0.01, words, rng), MIRROR)
    letters = sorted({char for one in chinese[:200] for char in one.text if char.isalpha()})
    for share in _EDITS[:3]:
        edit = _letter_editor(share, letters, rng)
        made += _copies(f"Chinese, {share:.0%} of characters edited", chinese_taken, edit)
    made += _copies("Chinese, exact", chinese_taken, lambda text: text)
    changed = _inserted(taken, questions, rng)
    hidden = [changed.get(document.name, document) for document in base]
    return Planted([*hidden, *made], questions, [*sources, MIRROR])


def duplicates(documents: Sequence[Document], priority: Sequence[str]) -> list[dict[str, Any]]:
    """A row of the attribute for each document."""
    digests = b"".join(sha256(one.text.encode()).digest() for one in documents)
    hashes = np.frombuffer(digests, np.uint8).reshape(-1, 32)
    texts = pa.array([one.text for one in documents], pa.large_string())
    signed = unpack(signatures(texts))
    found: list[dict[str, Any]] = [{} for _ in documents]
    shards, places = [], []
    for source in priority:
        chosen = [i for i, one in enumerate(documents) if one.source == source]
        if chosen:
            shards.append(_shard(source, documents, hashes, signed, np.array(chosen)))
            places.append(chosen)
    for chosen, table in zip(places, resolve(shards, priority)):
        for i, row in zip(chosen, table.to_pylist()):
            found[i] = row
    return found


def _shard(
    source: str,
    documents: Sequence[Document],
    hashes: np.ndarray,
    signed: Signatures,
    chosen: np.ndarray,
) -> Shard:
    return Shard(
        source,
        hashes[chosen],
        signed.keys[chosen],
        lambda rows: [documents[i].ingest_id for i in chosen[rows]],
        lambda rows: signed.sketch[chosen[rows]],
    )


def _texts(file: SourceFile) -> list[str]:
    blocks = JsonlSource(Reading("corpus"), [file]).blocks()
    records = (one for block in blocks for one in block.records())
    texts = [one.text[:_MAX_CHARS] for one in records if isinstance(one, Record)]
    return [text for text in texts if len(text) >= _LEAST_CHARS]


def _copies(
    kind: str, originals: Iterator[Document], edit: Edit, source: str = ""
) -> list[Document]:
    made = []
    for original, number in zip(originals, range(PER_KIND)):
        ingest_id = f"p-{kind}-{number:03d}".replace(" ", "-")  # after all d000000: the copy goes
        text = edit(original.text)
        made.append(Document(source or original.source, ingest_id, text, kind, original.name))
    return made


def _word_editor(share: float, words: Sequence[str], rng: random.Random) -> Edit:
    def edit(text: str) -> str:
        parts = text.split(" ")
        for place in rng.sample(range(len(parts)), max(1, round(share * len(parts)))):
            parts[place] = rng.choice(words)
        return " ".join(parts)

    return edit


def _letter_editor(share: float, letters: Sequence[str], rng: random.Random) -> Edit:
    def edit(text: str) -> str:
        chars = list(text)
        for place in rng.sample(range(len(chars)), max(1, round(share * len(chars)))):
            chars[place] = rng.choice(letters)
        return "".join(chars)

    return edit


def _inserted(
    taken: Iterator[Document], questions: Sequence[str], rng: random.Random
) -> dict[str, Document]:
    """Documents with something in their middle, by the name of the document that they replace."""
    changed = {}
    menu = "\n".join(_MENU)
    for number in range(PER_KIND):
        for kind, text in (
            ("evaluation question", questions[number]),
            ("e-mail address", f"Write to {rng.choice('abc')}.doe{number}@mail.example.org."),
            ("boilerplate", "\n".join([menu] * 60)),
        ):
            one = next(taken)
            lines = one.text.splitlines()
            lines.insert(len(lines) // 2, text)
            changed[one.name] = one._replace(text="\n".join(lines), kind=kind)
    return changed


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
