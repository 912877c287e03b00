"""`python -m benchmarks.attributes.decisions [FILE ...] --peers DIRECTORY`: rules of datatrove.

Decides every document by each clause of the presets, and by the same rule of datatrove alone, and
counts unequal decisions. The reason of an unequal decision is the first of our definitions that,
put into datatrove's filter, makes its decision equal to ours. Lines that the rules of C4 and
FineWeb keep are compared, too. Without files, the documents are those of the installed Python: its
modules, and texts and metadata of its packages. `--show N` prints the documents of each reason.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from benchmarks.attributes.datatrove_rules import SCRIPT
from benchmarks.attributes.planted import write_jsonl
from benchmarks.environments import install, version
from benchmarks.rounds import cpu_seconds
from nmoe_core.attributes.presets import PRESETS
from nmoe_core.attributes.signals import signals
from nmoe_core.cli.output import print_table
from nmoe_core.config.transforms import LinesTable
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.records import Reading, Record
from nmoe_core.text.normalise import normalize_batch, normalize_text
from nmoe_core.text.transforms.batch import Batch
from nmoe_core.text.transforms.edits import edited
from nmoe_core.text.transforms.lines.patterns import LINE_ENDS
from nmoe_core.text.transforms.lines.rules import LineRules
from tests.core.attributes import naive_signals as plain

_REQUIREMENTS = ("datatrove[io,processing]", "spacy")
_LEAST_CHARS, _MAX_CHARS = 200, 6000
_OF_PYTHON = ("*.py", "*.md", "*.rst", "*.txt", "METADATA", "LICENSE*")
_STDLIB = f"python3.{sys.version_info.minor}"
_ALONE = re.compile(plain.WORDS.pattern.partition("|")[0])  # a character that is a word
_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")


def main() -> None:
    """Print unequal decisions by rule and reason, unequal lines, and the ratio of time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="JSONL files, or directories of them")
    parser.add_argument("--peers", type=Path, required=True, help="directory of the environments")
    parser.add_argument("--python", action="store_true", help="beside files, those of Python, too")
    parser.add_argument("--documents", type=int, default=3500)
    parser.add_argument("--show", type=int, default=0, help="documents of each reason")
    options = parser.parse_args()
    python, problem = install("datatrove", _REQUIREMENTS, options.peers)
    if problem:
        raise SystemExit(f"datatrove: not installable: {problem}")
    texts = _sampled(_groups(options), options.documents)
    print(f"{len(texts)} documents, {version('datatrove', python)}, {version('spacy', python)}")
    theirs = _asked(python, texts)
    column = pa.array(texts, pa.large_string())
    signals(column[:10])
    measured: list[pa.Table] = []
    spent = cpu_seconds(lambda: measured.append(signals(column)))
    ours = _decided(measured[0])
    _show_rules(texts, ours, theirs, options.show)
    _show_presets(ours, theirs)
    _show_readings(measured[0], theirs)
    for name in ("c4", "fineweb"):
        _show_lines(name, texts, [answer["lines"][name] for answer in theirs["answers"]])
    print(f"datatrove's four filters take {theirs['seconds'] / spent:.0f} times our time")


def _sampled(groups: Iterator[tuple[str, Iterator[str]]], most: int) -> list[str]:
    """Normalised texts, each once, cut if they are long: as many of each group, if it has them, and
    the same ones every time."""
    seen: set[str] = set()
    found: list[list[str]] = []
    for name, group in groups:
        texts = dict.fromkeys(normalize_text(text[:_MAX_CHARS]) for text in group)
        found.append([text for text in texts if len(text) >= _LEAST_CHARS and text not in seen])
        seen |= texts.keys()
        print(f"{name}: {len(found[-1])}")
    each = -(-most // len(found))
    rng = np.random.default_rng(0)
    chosen = [[texts[i] for i in rng.permutation(len(texts))[:each].tolist()] for texts in found]
    return [text for texts in chosen for text in texts][:most]


def _groups(options: argparse.Namespace) -> Iterator[tuple[str, Iterator[str]]]:
    for name in options.files:
        path = Path(name)
        pattern, base = ("**/*.jsonl*", path) if path.is_dir() else (path.name, path.parent)
        for file in find_files([pattern], base):
            yield Path(file.name).name, _of_file(file)
    if options.python or not options.files:
        for pattern in _OF_PYTHON:
            yield pattern, _of_python(pattern)


def _of_file(file: Any) -> Iterator[str]:
    for block in JsonlSource(Reading("corpus"), [file]).blocks():
        yield from (one.text for one in block.records() if isinstance(one, Record))


def _of_python(pattern: str) -> Iterator[str]:
    roots = {Path(path) for path in sys.path if Path(path).name in ("site-packages", _STDLIB)}
    for root in sorted(roots):
        for path in sorted(root.rglob(pattern)):
            if path.is_file():
                yield path.read_text("utf-8", errors="replace")[:_MAX_CHARS]


def _asked(python: Path, texts: Sequence[str]) -> dict[str, Any]:
    """What datatrove decides, with the reasons."""
    rows = []
    for text in texts:
        words = plain.WORDS.findall(text)
        letters = [word for word in map(plain.letters, words) if word]
        solid = re.sub(r"^[^\S\n]+$", "", text, flags=re.MULTILINE)
        stripped = "\n".join(line.rstrip() for line in text.split("\n") if line.strip())
        spread = _ALONE.sub(r" \g<0> ", text)
        sentences = {}
        for line, spaced in zip(text.splitlines(), spread.splitlines(), strict=True):
            count = max(1, plain.sentences(_CITATION.sub("", line.strip())))
            sentences |= {_CITATION.sub("", one.strip()): count for one in (spaced, line)}
        one = {"text": text, "solid": solid, "plain": stripped, "spread": spread, "words": words}
        rows.append(one | {"letters": letters, "sentences": sentences})
    with tempfile.TemporaryDirectory() as directory:
        names = ("in.jsonl", "out.json", "settings.json", "peer.py")
        given, out, settings, script = (Path(directory) / name for name in names)
        write_jsonl(given, rows)
        settings.write_text(json.dumps({"ends": LINE_ENDS}), "utf-8")
        script.write_text(SCRIPT, "utf-8")
        subprocess.run([python, script, given, out, settings], check=True)
        return json.loads(out.read_text("utf-8"))


def _decided(measured: pa.Table) -> dict[str, np.ndarray]:
    """Whether each text passes each clause of the presets, by the clause's name: bool `[N]`."""
    named = {
        f"{preset}.{name}": clause
        for preset, rule in PRESETS.items()
        for name, clause in rule.named().items()
    }
    with duckdb.connect() as connection:
        connection.register("measured", measured)
        found = connection.execute(f"select {', '.join(named.values())} from measured").fetchnumpy()
    return dict(zip(named, (np.asarray(one, bool) for one in found.values()), strict=True))


def _show_rules(
    texts: Sequence[str], ours: dict[str, np.ndarray], theirs: dict[str, Any], show: int
) -> None:
    table = []
    for name, reasons in theirs["reasons"].items():
        views = np.array([answer["rules"][name] for answer in theirs["answers"]], bool)
        own = ours[name]
        unequal = np.flatnonzero(views[:, 0] != own)
        found: Counter[str] = Counter()
        for i in unequal.tolist():
            # A later definition may be needed together with an earlier one, so each is kept.
            equal = np.flatnonzero(views[i] == own[i])
            reason = reasons[equal[0]] if len(equal) else "other"
            found[reason] += 1
            if found[reason] <= show:
                says = "keeps" if own[i] else "drops"
                print(f"--- {name}: {reason}; nmoe {says}\n{texts[i][:600]!r}")
        kinds = ", ".join(f"{reason} {count}" for reason, count in found.most_common())
        drops = int((~own).sum()), int((~views[:, 0]).sum())
        table.append([name, *drops, len(unequal), kinds])
    print_table(("rule", "nmoe drops", "datatrove drops", "unequal", "by the definition"), table)


def _show_presets(ours: dict[str, np.ndarray], theirs: dict[str, Any]) -> None:
    names = ("gopher_quality", "gopher_repetition", "fineweb", "c4")
    whole = np.array([answer["whole"] for answer in theirs["answers"]], bool)
    table = []
    for i, name in enumerate(names):
        clauses = [passed for key, passed in ours.items() if key.startswith(f"{name}.")]
        own = np.logical_and.reduce(clauses)
        drops = int((~own).sum()), int((~whole[:, i]).sum())
        table.append([name, *drops, int((own != whole[:, i]).sum())])
    print()
    print_table(("preset", "nmoe drops", "datatrove drops", "unequal"), table)


def _show_readings(measured: pa.Table, theirs: dict[str, Any]) -> None:
    """Repeated n-grams, counted from the second occurrence as here, or with the first one."""
    other = np.array([answer["readings"] for answer in theirs["answers"]], bool)
    limits = (0.15, 0.14, 0.13, 0.12, 0.11, 0.10)
    columns = [measured.column(f"dup_{n}gram_chars").to_numpy() for n in range(5, 11)]
    own = np.array([column <= limit for column, limit in zip(columns, limits)]).T
    changed = (own.all(1) != other.all(1)).sum()
    drops = (~own.all(1)).sum(), (~other.all(1)).sum()
    print(f"\nrepeated n-grams: {drops[0]} dropped; with first occurrences {drops[1]}", end="; ")
    print(f"{changed} decisions change")


def _show_lines(preset: str, texts: Sequence[str], theirs: Sequence[Sequence[str]]) -> None:
    """Lines that one side alone keeps."""
    normal, payloads = normalize_batch(list(texts))
    batch = Batch(normal, payloads, [str(i) for i in range(len(texts))], range(len(texts)))
    table = LinesTable.model_validate({"kind": "lines", "presets": (preset,)})
    found = LineRules(table).edits(batch)
    kinds: Counter[str] = Counter()
    documents = lines = 0
    for i, text in enumerate(normal):
        after = edited(text, found.get(i, []))
        own = Counter(line.strip() for line in after.split("\n") if line.strip())
        other = Counter(line.strip() for line in theirs[i] if line.strip())
        lines += sum(bool(line.strip()) for line in text.split("\n"))
        documents += own != other
        for side, extra in (("kept by nmoe", own - other), ("kept by datatrove", other - own)):
            for line, count in extra.items():
                kinds[f"{side}: {_kind(line, table.c4_min_words)}"] += count
    print(f"\nlines of `{preset}`: {lines} lines, {documents} of {len(texts)} documents differ")
    print_table(("lines that one side alone keeps", "lines"), kinds.most_common())


def _kind(line: str, least_words: int) -> str:
    """Why datatrove and nmoe decide a line differently, as far as the line shows it."""
    if len(line.splitlines()) > 1:
        return "has a line end other than LF"
    if len(line.split()) < least_words <= len(plain.WORDS.findall(line)):
        return "words of a script without spaces"
    if _CITATION.search(line):
        return "has a mark of a citation"
    return f"ends with {line[-1]}"


if __name__ == "__main__":
    main()
