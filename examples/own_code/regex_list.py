"""An attribute by a list of regular expressions: how often each one is found in a text.

[attributes.words]
function = "regex_list:count"
path = "examples/own_code"
model = "patterns.toml"                 # dosage = '\\d+ mg', ...
columns = { dosage = "int", court = "int" }

As a transform, it removes what is found, and each change is recorded under the expression's name:

[[transforms]]
kind = "function"
function = "regex_list:remove"
path = "examples/own_code"
model = "patterns.toml"
"""

import re
import tomllib
from functools import cache
from pathlib import Path


@cache
def _patterns(path: Path) -> dict[str, re.Pattern[str]]:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: re.compile(pattern) for name, pattern in table.items()}


def count(batch):
    """The number of matches of each expression, as one column per expression."""
    patterns = _patterns(batch.model)
    return {
        name: [sum(1 for _ in pattern.finditer(text)) for text in batch.texts]
        for name, pattern in patterns.items()
    }


def remove(batch):
    """The spans to remove from each text."""
    return [_spans(text, _patterns(batch.model)) for text in batch.texts]


def _spans(text, patterns):
    found = []
    end = 0
    matches = [(m.start(), m.end(), name) for name, p in patterns.items() for m in p.finditer(text)]
    for start, stop, name in sorted(matches):
        if start >= end:  # of matches that overlap, the first is removed
            found.append((start, stop, "", name))
            end = stop
    return found
