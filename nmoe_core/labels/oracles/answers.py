"""Scores out of a final answer: the whole answer is the JSON object, or it is no answer.

An object among other words may be a guess, a quotation from the document, or what the document
told the model to say, so it is taken only on request, and marked as salvaged. Nothing is guessed:
an object that is not exactly five integers 0..4 is no answer, and two objects in one answer are
none either.
"""

from __future__ import annotations

import re

from nmoe_core.base.errors import LabelError
from nmoe_core.labels.scores import parse_scores

_FLAT_OBJECT = re.compile(r"\{[^{}]*\}")
# A Markdown fence with the object in it and nothing beside it is a way to write the object.
_FENCED = re.compile(r"\s*```(?:json)?[ \t]*\n([^`]*)\n[ \t]*```\s*", re.IGNORECASE)


def read_scores(text: str, salvage: bool = False) -> tuple[dict[str, int] | None, bool]:
    """The scores that an answer gives, or None; and whether they stood among other words.

    Args:
        text: The final answer.
        salvage: Take the one flat object among other words where the whole is none.
    """
    fenced = _FENCED.fullmatch(text)
    if (scores := _strict(fenced[1] if fenced else text)) is not None:
        return scores, False
    objects = _FLAT_OBJECT.findall(text) if salvage else []
    scores = _strict(objects[0]) if len(objects) == 1 else None
    return scores, scores is not None


def _strict(text: str) -> dict[str, int] | None:
    try:
        return parse_scores(text)
    except LabelError:
        return None
