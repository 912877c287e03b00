"""The words around a document that every model oracle reads, and the answer that is asked for.

The rubric is the instruction; the document is quoted between two fixed lines. Both lines, and the
schema of the answer, belong to `PROMPT_VERSION`, which labels carry through their scorer's version.
"""

from __future__ import annotations

from typing import Any

from nmoe_core.labels.scores import DIMENSIONS, MAX_GRADE

PROMPT_VERSION = "document-between-lines/1"
DOCUMENT_HEAD = "Text:\n\n"
DOCUMENT_TAIL = "\n\nEnd of the text. Output the JSON object only."


def answer_schema() -> dict[str, Any]:
    """JSON schema of an answer: the five dimensions, integers 0..4, nothing else."""
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
