"""What every model oracle is asked, and how the scores are read out of its final answer.

The rubric is the instruction; the document is quoted between two fixed lines. Both lines, and the
schema of the answer, belong to `PROMPT_VERSION`, which labels carry through their scorer's version.

The whole final answer is the JSON object, or it is no answer. An object among other words may be a
guess, a quotation from the document, or what the document told the model to say, so it is taken
only on request, and marked as salvaged. An object that is not exactly five integers 0..4 is no
answer, and two objects in one answer are none either.
"""

from __future__ import annotations

import re
from typing import Any

from nmoe_core.base.errors import LabelError
from nmoe_core.labels.scores import DIMENSIONS, MAX_GRADE, parse_scores

PROMPT_VERSION = "document-between-lines/1"
DOCUMENT_HEAD = "Text:\n\n"
DOCUMENT_TAIL = "\n\nEnd of the text. Output the JSON object only."
_FLAT_OBJECT = re.compile(r"\{[^{}]*\}")
# A whole answer may stand in a Markdown fence.
_FENCED = re.compile(r"\s*```(?:json)?[ \t]*\n([^`]*)\n[ \t]*```\s*", re.IGNORECASE)


def answer_schema() -> dict[str, Any]:
    """JSON schema of an answer: exactly the five dimensions, integers 0..4."""
    grade = {"type": "integer", "minimum": 0, "maximum": MAX_GRADE}
    return {
        "type": "object",
        "properties": dict.fromkeys(DIMENSIONS, grade),
        "required": list(DIMENSIONS),
        "additionalProperties": False,
    }


def without_control_spelling(text: str) -> str:
    """The text with no spelling of a control token such as `<|end|>` left in it.

    Chat servers hand message text to tokenizers that may read such a spelling as the token itself;
    a space after the bracket keeps it readable and makes it text everywhere.
    """
    return text.replace("<|", "< |").replace("<｜", "< ｜")


def read_scores(text: str, salvage: bool = False) -> tuple[dict[str, int] | None, bool]:
    """The scores that an answer gives, or None; and whether they stood among other words.

    Args:
        text: The final answer.
        salvage: Where the whole is not the object, take the only flat object among other words.
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
