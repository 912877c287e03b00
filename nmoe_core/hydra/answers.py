"""Scores out of an answer's text: strict first, else the one flat JSON object among other words.

Nothing is guessed: an object that is not exactly five integers 0..4 is no answer, and two objects
in one answer are none either (one of them may be quoted from the document).
"""

from __future__ import annotations

import re

from nmoe_core.errors import LabelError
from nmoe_core.hydra.scores import parse_scores

_FLAT_OBJECT = re.compile(r"\{[^{}]*\}")


def read_scores(text: str) -> tuple[dict[str, int] | None, bool]:
    """The scores that `text` gives, or None; and whether they stood among other words."""
    if (scores := _strict(text)) is not None:
        return scores, False
    objects = _FLAT_OBJECT.findall(text)
    scores = _strict(objects[0]) if len(objects) == 1 else None
    return scores, scores is not None


def _strict(text: str) -> dict[str, int] | None:
    try:
        return parse_scores(text)
    except LabelError:
        return None
