"""Expected grades: the mean of each grade by the probabilities that the model gave to the digits.

The most likely digit hides how sure the model was. At the position of each grade in an answer, the
reply has the log-probabilities of the likeliest tokens. The tokens that are a grade of the scale
are weighed by their probability, divided by the probability of all of these.
"""

import bisect
import itertools
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from nmoe_core.base.errors import ConfigError
from nmoe_core.labels.scores import DECIMALS, Scale

NO_LOGPROBS = "no_logprobs"  # the reply has none, or they are not those of the answer
LOW_MASS = "low_grade_mass"  # the model would rather write something that is no grade
TOP_LOGPROBS = 20  # the most that OpenAI allows
# A key of a flat object and its value; the object was parsed before.
_ITEM = re.compile(
    r'\s*(?P<key>"(?:[^"\\]|\\.)*")\s*:\s*(?:"(?:[^"\\]|\\.)*"|(?P<grade>[^\s,}]+))\s*[,}]',
    re.DOTALL,
)
_DIGIT = re.compile(r"\s*(\d)(?:[\s,}].*)?", re.DOTALL | re.ASCII)
Token = tuple[bytes, dict[bytes, float]]  # what was written, and the probabilities of what could be


def require_digits(scale: Scale) -> None:
    """Raise ConfigError unless each grade of the scale is one digit."""
    if min(scale.lowest) < 0 or max(scale.highest) > 9:
        raise ConfigError(
            "expected grades need grades of one digit",
            where='[oracle.http] grades = "expected"',
            found=f"grades {min(scale.lowest)} to {max(scale.highest)}",
            expected="grades 0 to 9",
            do='use a rubric with fewer grades, or grades = "written"',
        )


def expected_scores(
    answer: str, logprobs: object, scale: Scale, min_mass: float
) -> tuple[dict[str, float] | None, str]:
    """The expected scores of an answer, or None and the reason of the failure.

    `answer` is the object of scores as the model wrote it. `logprobs` is the field of a chat
    completion's choice. `min_mass` is the least probability that all grades of a dimension must
    have together.
    """
    try:
        tokens = [_token(entry) for entry in logprobs["content"]]  # pyright: ignore
    except (TypeError, KeyError, ValueError, AttributeError):
        return None, NO_LOGPROBS
    ends = list(itertools.accumulate(len(written) for written, _ in tokens))
    start = b"".join(written for written, _ in tokens).rfind(answer.encode())
    if start < 0:
        return None, NO_LOGPROBS
    found: dict[str, float] = {}
    for name, place in _places(answer):
        i = bisect.bisect_right(ends, start + place)
        written, chances = tokens[i]
        begun = written[: start + place - (ends[i] - len(written))]
        k = scale.names.index(name)
        mass = dict.fromkeys(range(scale.lowest[k], scale.highest[k] + 1), 0.0)
        for token, chance in chances.items():
            digit = _DIGIT.fullmatch(token.removeprefix(begun).decode("latin-1"))
            if digit is not None and int(digit[1]) in mass:
                mass[int(digit[1])] += chance
        total = sum(mass.values())
        if total < min_mass:
            return None, LOW_MASS
        mean = sum(grade * chance for grade, chance in mass.items()) / total
        found[name] = round(mean, DECIMALS)
    return {name: found[name] for name in scale.names}, ""


def _token(entry: dict[str, Any]) -> Token:
    chances: dict[bytes, float] = {}
    for one in (entry, *(entry.get("top_logprobs") or ())):
        chances[_bytes(one)] = min(1.0, math.exp(one["logprob"]))
    return _bytes(entry), chances


def _bytes(entry: dict[str, Any]) -> bytes:
    """The bytes of a token. A token may be a part of a character, so servers give its bytes."""
    given = entry.get("bytes")
    return bytes(given) if isinstance(given, list) else entry["token"].encode()


def _places(answer: str) -> Iterator[tuple[str, int]]:
    """The name and the position in bytes of each grade in an object of scores."""
    at = answer.index("{") + 1
    while (item := _ITEM.match(answer, at)) is not None:
        if item["grade"]:
            yield json.loads(item["key"]), len(answer[: item.start("grade")].encode())
        at = item.end()
