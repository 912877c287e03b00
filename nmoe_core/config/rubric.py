"""A rubric: what each of the five dimensions asks, versioned, with a hash that labels carry."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from loader.plan.packaged import find_config
from loader.plan.tables import read_toml
from nmoe_core.base.errors import ConfigError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.base.strict import StrictModel, validate

DIMENSIONS = ("helpfulness", "correctness", "coherence", "complexity", "density")
MAX_GRADE = 4
_FOLDER = "configs/rubrics"


class Dimension(StrictModel):
    """One dimension: the question it answers and what each grade 0..4 means."""

    question: str = Field(min_length=1)
    grades: tuple[str, ...] = Field(min_length=MAX_GRADE + 1, max_length=MAX_GRADE + 1)


class Rubric(StrictModel):
    """A named version of the rubric; equal text has an equal `hash`."""

    name: str = Field(min_length=1)
    version: str = Field(min_length=1)
    instructions: str = Field(min_length=1)
    answer: str = Field(min_length=1)
    dimensions: dict[str, Dimension]

    @classmethod
    def load(cls, path: Path) -> Rubric:
        """Read a rubric file; ConfigError where it is missing or malformed, or its dimensions are
        not the five in order."""
        rubric = validate(cls, read_toml(path), path)
        if tuple(rubric.dimensions) != DIMENSIONS:
            raise ConfigError(
                "a rubric has other dimensions",
                where=path,
                found=", ".join(rubric.dimensions),
                expected=", ".join(DIMENSIONS),
            )
        return rubric

    def __hash__(self) -> int:
        return hash(self.hash)

    @property
    def hash(self) -> str:
        """SHA-256 over every word that reaches an oracle."""
        rows = [[name, d.question, list(d.grades)] for name, d in self.dimensions.items()]
        return sha256_json([self.name, self.version, self.instructions, self.answer, rows])

    def turned(self) -> Rubric:
        """The same rubric with its dimensions in reverse order, for a second opinion."""
        return self.model_copy(update={"dimensions": dict(reversed(self.dimensions.items()))})

    def text(self) -> str:
        """The rubric as an oracle reads it."""
        parts = [self.instructions.strip()]
        for name, dimension in self.dimensions.items():
            grades = "\n".join(f"  {grade}: {text}" for grade, text in enumerate(dimension.grades))
            parts.append(f"{name}: {dimension.question}\n{grades}")
        return "\n\n".join([*parts, self.answer.strip()])


def find_rubric(named: str, base: Path, where: Path) -> Path:
    """The file of the rubric that the configuration `where` names, by its path from `base` on or by
    name (`quality_v1`). Raises ConfigError where there is no such name (E-CONFIG-MISSING)."""
    return find_config(named, _FOLDER, base, "nmoe_core", f"{where}: [oracle] rubric")
