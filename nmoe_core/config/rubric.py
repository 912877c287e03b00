"""A rubric: a question and grades per dimension, with a version, and a hash that labels record."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from loader.plan.packaged import find_config
from loader.plan.tables import read_toml
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.base.strict import StrictModel, validate

_FOLDER = "configs/rubrics"
_NAME = re.compile(r"[a-z][a-z0-9_]*")
# Names that a dimension may not have: other columns of grades and of the view of attributes use
# them.
_TAKEN = ("doc_id", "source", "decision", "aggregated", "q_probe", "q_student", "early_exit")
_TAKEN += ("aggregate", "all")
REASON = "reason"  # the key of the reason in an answer
_REASON_FIRST = f"""
The object begins with one more key, {REASON}: a text of at most three sentences that says what \
decides the grades. The keys named above follow.
"""


EXAMPLES = "# Examples: documents that people corrected, and their grades."


def code_of(text: str) -> str:
    """A code of 18 digits that a text cannot hold, because it is made from the text. Lines with the
    code enclose the text in a prompt."""
    digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    return f"{int(digest[:15], 16) % 10**18:018d}"


class Example(StrictModel):
    """A document that people graded, as an oracle reads it: the beginning of its text, its grades,
    and the reason. `doc_id` says where it is from; the oracle does not read it."""

    doc_id: str = ""
    text: str = Field(min_length=1)
    scores: dict[str, int]
    note: str = ""


class Dimension(StrictModel):
    """One dimension: the question it asks, and the meaning of each grade, lowest first. `weight` is
    its relative weight in the aggregate."""

    question: str = Field(min_length=1)
    grades: tuple[str, ...] = Field(min_length=2)
    lowest: int = 0
    weight: float = Field(1.0, ge=0, allow_inf_nan=False)


class Rubric(StrictModel):
    """A named version of a rubric; rubrics with equal text have equal `hash`."""

    name: str = Field(min_length=1)
    version: str = Field(min_length=1)
    instructions: str = Field(min_length=1)
    answer: str = Field(min_length=1)
    dimensions: dict[str, Dimension] = Field(min_length=1)
    reason: Literal["none", "first"] = "none"
    """`first`: an answer begins with a reason, as the key `reason`, before the grades."""
    examples: tuple[Example, ...] = ()
    """Documents with the grades of people, as `nmoe hydra corrections --output` writes them."""
    _is_turned: bool = PrivateAttr(default=False)

    @classmethod
    def load(cls, path: Path) -> Rubric:
        """Read a rubric file. Raises ConfigError if it is missing or malformed."""
        return validate(cls, read_toml(path), path)

    @field_validator("dimensions")
    @classmethod
    def _are_columns(cls, value: dict[str, Dimension]) -> dict[str, Dimension]:
        for name in value:
            if not _NAME.fullmatch(name) or name in _TAKEN:
                problem = (
                    "is the name of another column" if name in _TAKEN else "is not a valid name"
                )
                raise ValueError(
                    f"dimension {name!r} {problem}: use a-z, 0-9 and _, a letter first"
                )
        if not any(one.weight for one in value.values()):
            raise ValueError("every weight is 0")
        return value

    @model_validator(mode="after")
    def _has_one_reason(self) -> Rubric:
        if self.has_reason and REASON in self.dimensions:
            raise ValueError(f'dimension {REASON!r} is the key of the reason in reason = "first"')
        return self

    @model_validator(mode="after")
    def _has_graded_examples(self) -> Rubric:
        for number, example in enumerate(self.examples, 1):
            if example.scores.keys() != self.dimensions.keys():
                raise ValueError(f"example {number} does not grade each dimension")
            for name, grade in example.scores.items():
                place = grade - self.dimensions[name].lowest
                if not 0 <= place < len(self.dimensions[name].grades):
                    raise ValueError(f"example {number}: {name} = {grade} is no grade")
        return self

    def __hash__(self) -> int:
        return hash(self.hash)

    @property
    def hash(self) -> str:
        """SHA-256 of what grades mean: all text that an oracle reads, except for `form`."""
        rows = [
            [name, one.question, list(one.grades), *([one.lowest] if one.lowest else [])]
            for name, one in self._asked()
        ]
        return sha256_json([self.name, self.version, self.instructions, self.answer, rows])

    @property
    def has_reason(self) -> bool:
        """Whether an answer begins with a reason."""
        return self.reason == "first"

    @property
    def form(self) -> dict[str, Any]:
        """How an oracle is asked, beyond what grades mean: its answers depend on it, but a person's
        corrections do not. Empty by default."""
        examples = [[one.text, one.scores, one.note] for one in self.examples]
        found = {"reason": self.reason} if self.has_reason else {}
        return found | ({"examples": sha256_json(examples)} if examples else {})

    def turned(self) -> Rubric:
        """The same rubric with its dimensions in reverse order, for a second labelling."""
        turned = self.model_copy()
        turned._is_turned = not self._is_turned
        return turned

    def _asked(self) -> list[tuple[str, Dimension]]:
        """The dimensions in the order in which an oracle reads them."""
        return list(self.dimensions.items())[:: -1 if self._is_turned else 1]

    def text(self) -> str:
        """The rubric as an oracle reads it."""
        parts = [self.instructions.strip()]
        for name, dimension in self._asked():
            numbered = enumerate(dimension.grades, dimension.lowest)
            grades = "\n".join(f"  {grade}: {text}" for grade, text in numbered)
            parts.append(f"{name}: {dimension.question}\n{grades}")
        for example in self.examples:
            code = code_of(example.text)
            graded = ", ".join(f"{name} {example.scores[name]}" for name, _ in self._asked())
            note = f" ({example.note})" if example.note else ""
            told = f"A person gave this example of a document these grades: {graded}{note}."
            parts.append(f"Example {code}:\n\n{example.text}\n\nEnd of example {code}. {told}")
        answer = self.answer.strip() + (_REASON_FIRST.rstrip() if self.has_reason else "")
        return "\n\n".join([*parts, answer])


def find_rubric(named: str, base: Path, where: Path) -> Path:
    """The rubric file that the configuration `where` names: a path relative to `base`, or the name
    of a bundled rubric (`quality_v1`). Raises ConfigError if there is no such file or name
    (E-CONFIG-MISSING)."""
    return find_config(named, _FOLDER, base, "nmoe_core", f"{where}: [oracle] rubric")
