"""`python -m benchmarks.attributes.languages --peers DIRECTORY [--corpus DIRECTORY]`: languages.

Sets: short texts of 27 languages, code and noise; the translations of Django into 80 languages, one
string each and eight strings each, from its package; with --corpus, texts of 200 to 4,000
characters of sources in one language, and pages of tldr, whose ids name the language. For each
library, the share of texts whose language is right, that get no language, and that get a wrong one,
and the rate on one core. Libraries run in environments of their own.
"""

from __future__ import annotations

import argparse
import gettext
import json
import random
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import eldc
import numpy as np
import pyarrow as pa

from benchmarks.attributes.judges import LANGUAGE_PEERS
from benchmarks.attributes.planted import write_jsonl
from benchmarks.environments import install
from benchmarks.rounds import cpu_seconds
from nmoe_core.attributes.language import UNDETERMINED, language
from nmoe_core.cli.output import print_table
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.records import Reading, Record

SHORT = Path(__file__).parents[2] / "tests/core/attributes/short_texts.jsonl"
KNOWN = frozenset(eldc.LANGUAGES)
_SAME = {"nb": "no", "nn": "no", "zh-cn": "zh", "zh-tw": "zh", "zh-Hant": "zh", "iw": "he"}
_OF_SOURCE = {"law_german": "de", "poetry_chinese": "zh", "books_english": "en"}
_OF_ID = re.compile(r"tldr/pages(?:\.([a-z]+)(?:_\w+)?)?/")
_MAX_CHARS, _LEAST_CHARS, _LEAST_STRING = 4000, 200, 20
_PLACEHOLDER = re.compile(r"%\(\w+\)[sd]|%[sd]|\{\w*\}|<[^>]+>")
_STRINGS, _JOINED = 56, 8


class _Text(NamedTuple):
    text: str
    language: str


class _Side(NamedTuple):
    seconds: float
    answers: list[str]


def main() -> None:
    """Print a table of each set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, required=True, help="directory of the environments")
    parser.add_argument("--corpus", type=Path, help="directory of JSONL files")
    parser.add_argument("--documents", type=int, default=150, help="of each language of the corpus")
    options = parser.parse_args()
    sets = _sets(options)
    language(pa.array(["warm"], pa.large_string()))
    sides = {"eldc": {name: _ours(texts) for name, texts in sets.items()}}
    for name, peer in LANGUAGE_PEERS.items():
        python, problem = install(peer.requirement, (peer.requirement,), options.peers)
        if problem:
            print(f"{name}: not installable: {problem}")
            continue
        sides[name] = {of: _peer(python, peer.script, texts) for of, texts in sets.items()}
    for name, texts in sets.items():
        rows = [_row(side, texts, found[name]) for side, found in sides.items()]
        num = len({one.language for one in texts})
        print(f"\n{name}: {len(texts)} texts, {num} languages")
        print_table(
            ("library", "right %", "none %", "wrong %", "right of the 60 %", "MB/s", "least"), rows
        )


def _sets(options: argparse.Namespace) -> dict[str, list[_Text]]:
    lines = SHORT.read_text("utf-8").splitlines()
    short = [_Text(one["text"], one["lang"]) for one in map(json.loads, lines)]
    found = {
        "short texts": [one for one in short if one.language != UNDETERMINED],
        "code and noise": [one for one in short if one.language == UNDETERMINED],
    }
    python, problem = install("django", ("django",), options.peers)
    if problem:
        print(f"django: not installable: {problem}")
    else:
        strings = _translations(python.parent.parent)
        found["one string of Django"] = [one for many in strings for one in many]
        found["eight strings of Django"] = [
            _Text(" ".join(one.text for one in many[i : i + _JOINED]), many[0].language)
            for many in strings
            for i in range(0, len(many), _JOINED)
        ]
    if options.corpus:
        found["long texts"] = _sampled([*_texts(options.corpus)], options.documents)
    return found


def _translations(environment: Path) -> list[list[_Text]]:
    """Strings of at least 20 characters of each translation of Django, without placeholders."""
    texts: dict[str, set[str]] = defaultdict(set)
    for path in sorted(environment.glob("lib/*/site-packages/django/**/LC_MESSAGES/*.mo")):
        with path.open("rb") as file:
            catalog = gettext.GNUTranslations(file)._catalog  # pyright: ignore
        for source, translated in catalog.items():
            text = _PLACEHOLDER.sub("", translated).strip()
            is_new = translated != (source[0] if isinstance(source, tuple) else source)
            if source and is_new and len(text) >= _LEAST_STRING:
                texts[path.parents[1].name].add(text)
    rng = random.Random(0)
    found = []
    for locale, strings in sorted(texts.items()):
        if len(strings) >= _STRINGS:
            code = locale.partition("_")[0]
            chosen = rng.sample(sorted(strings), _STRINGS)
            found.append([_Text(text, _SAME.get(code, code)) for text in chosen])
    return found


def _texts(directory: Path) -> Iterator[_Text]:
    """The documents of all corpora whose language is known, each text once, cut if it is long."""
    seen: set[str] = set()
    for file in find_files(["**/*.jsonl*"], directory):
        source = Path(file.name).name.split(".")[0]
        for block in JsonlSource(Reading("corpus"), [file]).blocks():
            for one in (record for record in block.records() if isinstance(record, Record)):
                text = one.text[:_MAX_CHARS]
                by_id = _OF_ID.match(one.id)
                known = (by_id[1] or "en") if by_id else _OF_SOURCE.get(source)
                if known and len(text) >= _LEAST_CHARS and text not in seen:
                    seen.add(text)
                    yield _Text(text, _SAME.get(known, known))


def _sampled(texts: Sequence[_Text], most: int) -> list[_Text]:
    """At most so many of each language that has 20; the same ones every time."""
    groups: dict[str, list[_Text]] = defaultdict(list)
    for i in np.random.default_rng(0).permutation(len(texts)).tolist():
        if len(groups[texts[i].language]) < most:
            groups[texts[i].language].append(texts[i])
    return [one for _, group in sorted(groups.items()) if len(group) >= 20 for one in group]


def _ours(texts: Sequence[_Text]) -> _Side:
    column = pa.array([one.text for one in texts], pa.large_string())
    answers: list[str] = []
    spent = cpu_seconds(lambda: answers.extend(language(column).column("lang").to_pylist()))
    return _Side(spent, answers)


def _peer(python: Path, script: str, texts: Sequence[_Text]) -> _Side:
    """What a peer's script answers, and its processor seconds."""
    with tempfile.TemporaryDirectory() as directory:
        given, path, out = (Path(directory) / name for name in ("in.jsonl", "peer.py", "out.json"))
        write_jsonl(given, [{"text": one.text} for one in texts])
        path.write_text(script, "utf-8")
        subprocess.run([python, path, given, out], check=True)
        found = json.loads(out.read_text("utf-8"))
    return _Side(found["seconds"], [_SAME.get(one, one) for one in found["answers"]])


def _row(name: str, texts: Sequence[_Text], side: _Side) -> list[str]:
    """Shares of a library on a set; pseudo-languages of CLD2 are no answer."""
    answers = [UNDETERMINED if one.startswith("xx-") else one for one in side.answers]
    right = np.array([one.language == answer for one, answer in zip(texts, answers)])
    none = np.array([answer == UNDETERMINED for answer in answers])
    known = np.array([one.language in KNOWN for one in texts])
    of_language: dict[str, list[bool]] = defaultdict(list)
    for one, is_right in zip(texts, right.tolist()):
        of_language[one.language].append(is_right)
    least = sorted((float(np.mean(found)), code) for code, found in of_language.items())
    size_mb = sum(len(one.text.encode()) for one in texts) / 1e6
    shares = right.mean(), none.mean(), (~right & ~none).mean()
    of_known = f"{100 * right[known].mean():.1f}" if known.any() else ""
    worst = ", ".join(f"{code} {100 * share:.0f}" for share, code in least[:3])
    percent = [f"{100 * share:.1f}" for share in shares]
    return [name, *percent, of_known, f"{size_mb / side.seconds:.1f}", worst]


if __name__ == "__main__":
    main()
