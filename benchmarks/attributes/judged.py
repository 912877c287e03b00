"""`python -m benchmarks.attributes.judged DIRECTORY --peers DIRECTORY`: languages and rules.

Languages of labelled texts: those of sources in one language, and pages of tldr, whose ids name it.
Rules of Gopher and C4 by our signals and by datatrove, each rule alone on the same texts, then the
time of all of them. Every text is there once. Peers run in environments of their own; figures of
time are processor seconds, in rounds in which sides take turns.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from benchmarks.attributes.judges import LANGUAGE_PEERS, RULES, RULES_PEER
from benchmarks.attributes.planted import write_jsonl
from benchmarks.environments import install
from benchmarks.rounds import alternate, cpu_seconds, ratios, spread
from nmoe_core.attributes.language import language
from nmoe_core.attributes.presets import PRESETS
from nmoe_core.attributes.signals import signals
from nmoe_core.attributes.where import Where
from nmoe_core.cli.output import print_table
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.records import Reading, Record

_OF_SOURCE = {"law_german": "de", "poetry_chinese": "zh", "books_english": "en"}
_OF_ID = re.compile(r"tldr/pages(?:\.([a-z]+)(?:_\w+)?)?/")
_SAME = {"nb": "no", "nn": "no", "zh-cn": "zh", "zh-tw": "zh", "iw": "he", "in": "id"}
_MAX_CHARS, _LEAST_CHARS, _LEAST_DOCUMENTS = 4000, 200, 20


class _Text(NamedTuple):
    source: str
    text: str
    language: str | None


class _Side(NamedTuple):
    seconds: float
    answers: list[Any]


def main() -> None:
    """Print the table of languages, that of rules, and the ratios of time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--peers", type=Path, help="directory of the peers' environments")
    parser.add_argument("--documents", type=int, default=150, help="of each language and source")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("languages", "rules"))
    options = parser.parse_args()
    found = _texts(options.directory)
    if options.only != "rules":
        _languages(_sampled(found, lambda one: one.language, options.documents), options)
    if options.only != "languages":
        _rules(_sampled(found, lambda one: one.source, options.documents), options)


def _texts(directory: Path) -> list[_Text]:
    """The documents of all corpora, each text once, cut where they are long."""
    found: dict[str, _Text] = {}
    for file in find_files(["**/*.jsonl*"], directory):
        source = Path(file.name).name.split(".")[0]
        for block in JsonlSource(Reading("corpus"), [file]).blocks():
            for one in (record for record in block.records() if isinstance(record, Record)):
                text = one.text[:_MAX_CHARS]
                by_id = _OF_ID.match(one.id)
                known = (by_id[1] or "en") if by_id else _OF_SOURCE.get(source)
                if len(text) >= _LEAST_CHARS:
                    found.setdefault(text, _Text(source, text, _SAME.get(known or "", known)))
    return list(found.values())


def _sampled(texts: Sequence[_Text], key: Callable[[_Text], str | None], most: int) -> list[_Text]:
    """At most so many of each key, of keys that have enough; the same ones every time."""
    groups: dict[str, list[_Text]] = defaultdict(list)
    for i in np.random.default_rng(0).permutation(len(texts)).tolist():
        if (name := key(texts[i])) is not None and len(groups[name]) < most:
            groups[name].append(texts[i])
    kept = [group for _, group in sorted(groups.items()) if len(group) >= _LEAST_DOCUMENTS]
    return [one for group in kept for one in group]


def _peer(python: Path, script: str, texts: Sequence[_Text]) -> _Side:
    """What a peer's script answers, and its processor seconds."""
    with tempfile.TemporaryDirectory() as directory:
        given, path, out = (Path(directory) / name for name in ("in.jsonl", "peer.py", "out.json"))
        write_jsonl(given, [{"text": one.text} for one in texts])
        path.write_text(script, "utf-8")
        command = [python, path, given, out]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not out.exists():
            raise SystemExit(
                f"{path.name}: {(done.stderr.strip().splitlines() or ['?'])[-1][:200]}"
            )
        return _Side(**json.loads(out.read_text("utf-8")))


def _installed(
    peers: dict[str, tuple[tuple[str, ...], str]], root: Path | None
) -> dict[str, tuple[Path, str]]:
    """Interpreter and script of each peer that can be had; why another cannot is printed."""
    found = {}
    for name, (requirements, script) in peers.items():
        if root is None:
            print(f"{name}: skipped, --peers names no directory")
            continue
        python, problem = install(name, requirements, root)
        if problem:
            print(f"{name}: not installable: {problem}")
        else:
            found[name] = python, script
    return found


def _languages(texts: list[_Text], options: argparse.Namespace) -> None:
    column = pa.array([one.text for one in texts], pa.large_string())
    language(column[:10])

    def ours() -> _Side:
        answers: list[str] = []
        spent = cpu_seconds(lambda: answers.extend(language(column).column("lang").to_pylist()))
        return _Side(spent, answers)

    sides: dict[str, Callable[[], _Side]] = {"ours": ours}
    for name, (python, script) in _installed(LANGUAGE_PEERS, options.peers).items():
        sides[name] = lambda python=python, script=script: _peer(python, script, texts)
    found = alternate(sides, options.rounds)
    named = {
        name: [_SAME.get(answer, answer) for answer in rounds[0].answers]
        for name, rounds in found.items()
    }
    wanted = [one.language for one in texts]
    rows = []
    for lang, count in sorted(Counter(wanted).items(), key=lambda item: str(item[0])):
        own = [i for i, one in enumerate(wanted) if one == lang]
        shares = [np.mean([answers[i] == lang for i in own]) for answers in named.values()]
        wrong = Counter(named["ours"][i] for i in own if named["ours"][i] != lang)
        others = ", ".join(f"{name} {n}" for name, n in wrong.most_common(2))
        rows.append([lang, count, *(f"{100 * share:.1f}" for share in shares), others])
    means = (np.mean([float(row[2 + i]) for row in rows]) for i in range(len(named)))
    rows.append(["mean", len(texts), *(f"{mean:.1f}" for mean in means), ""])
    print_table(("language", "texts", *(f"{name} %" for name in named), "ours instead"), rows)
    print(f"ours: {named['ours'].count('und')} of {len(texts)} texts get no language")
    _show_times(found, len(texts))


def _rules(texts: list[_Text], options: argparse.Namespace) -> None:
    column = pa.array([one.text for one in texts], pa.large_string())
    signals(column[:10])
    sides: dict[str, Callable[[], _Side]] = {
        "ours": lambda: _Side(cpu_seconds(lambda: signals(column)), [])
    }
    for name, (python, script) in _installed(RULES_PEER, options.peers).items():
        sides[name] = lambda python=python, script=script: _peer(python, script, texts)
    found = alternate(sides, options.rounds)
    kept = _kept(signals(column))
    for name, rounds in found.items():
        if name == "ours":
            continue
        table = []
        for rule, (preset, clauses) in RULES.items():
            own = np.logical_and.reduce([kept[preset][i] for i in clauses])
            row: list[Any] = [f"{preset}: {rule}", int((~own).sum())]
            for of in ("", " by spaces"):
                other = np.array([answer[rule + of] for answer in rounds[0].answers])
                row += [int((~other).sum()), f"{100 * np.mean(own == other):.2f}"]
            table.append(row)
        theirs = f"{name} drops", "agree %", "by spaces", "agree %"
        print_table(("rule", "ours drop", *theirs), table)
    print(f"{len(texts)} texts of {len({one.source for one in texts})} sources")
    _show_times(found, len(texts))


def _kept(measured: pa.Table) -> dict[str, list[np.ndarray]]:
    """Whether each text passes each clause of the presets."""
    schema = {f"signals.{field.name}": field.type for field in measured.schema}
    labelled, found = measured.rename_columns(list(schema)), {}
    for preset in dict.fromkeys(preset for preset, _ in RULES.values()):
        found[preset] = []
        for clause in PRESETS[preset].clauses:
            rule = Where(clause, schema, "benchmark")
            passed = rule.evaluate(labelled.select(list(rule.columns)))
            found[preset].append(np.logical_and.reduce([np.asarray(part) for part in passed]))
    return found


def _show_times(found: dict[str, list[_Side]], count: int) -> None:
    ours = [one.seconds for one in found["ours"]]
    for name, rounds in found.items():
        spent = [one.seconds for one in rounds]
        rate = f"{count / min(spent):,.0f} texts per processor second"
        compared = f", {spread(ratios(spent, ours))} x our time" if name != "ours" else ""
        print(f"{name}: {rate}{compared}")


if __name__ == "__main__":
    main()
