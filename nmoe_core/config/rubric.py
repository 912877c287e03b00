"""A rubric: what each of the five dimensions asks, versioned, with a hash that labels carry."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pydantic import Field

from loader.plan.tables import read_toml
from nmoe_core.base.errors import ConfigError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.base.strict import StrictModel, validate

CONFIGS = Path(__file__).parent.parent / "configs"
DIMENSIONS = ("helpfulness", "correctness", "coherence", "complexity", "density")
MAX_GRADE = 4


class _DimensionTable(StrictModel):
    question: str = Field(min_length=1)
    grades: tuple[str, ...] = Field(min_length=MAX_GRADE + 1, max_length=MAX_GRADE + 1)


class _RubricTable(StrictModel):
    name: str = Field(min_length=1)
    version: str = Field(min_length=1)
    instructions: str = Field(min_length=1)
    answer: str = Field(min_length=1)
    dimensions: dict[str, _DimensionTable]


@dataclass(frozen=True)
class Dimension:
    """One dimension: the question it answers and what each grade 0..4 means."""

    name: str
    question: str
    grades: tuple[str, ...]


@dataclass(frozen=True)
class Rubric:
    """A named version of the rubric; equal text has an equal `hash`."""

    name: str
    version: str
    instructions: str
    answer: str
    dimensions: tuple[Dimension, ...]

    @classmethod
    def load(cls, path: Path) -> Rubric:
        """Read a rubric file.

        Raises:
            ConfigError: Missing, malformed, or its dimensions are not the five in order (E-CONFIG).
        """
        table = validate(_RubricTable, read_toml(path), path)
        if tuple(table.dimensions) != DIMENSIONS:
            raise ConfigError(
                "a rubric has other dimensions",
                where=path,
                found=", ".join(table.dimensions),
                expected=", ".join(DIMENSIONS),
            )
        dimensions = tuple(
            Dimension(name, entry.question, tuple(entry.grades))
            for name, entry in table.dimensions.items()
        )
        return cls(table.name, table.version, table.instructions, table.answer, dimensions)

    @cached_property
    def hash(self) -> str:
        """SHA-256 over every word that reaches an oracle."""
        rows = [[d.name, d.question, list(d.grades)] for d in self.dimensions]
        return sha256_json([self.name, self.version, self.instructions, self.answer, rows])

    def turned(self) -> Rubric:
        """The same rubric with its dimensions in reverse order, for a second opinion."""
        return replace(self, dimensions=self.dimensions[::-1])

    def text(self) -> str:
        """The rubric as an oracle reads it."""
        parts = [self.instructions.strip()]
        for dimension in self.dimensions:
            grades = "\n".join(f"  {grade}: {text}" for grade, text in enumerate(dimension.grades))
            parts.append(f"{dimension.name}: {dimension.question}\n{grades}")
        return "\n\n".join([*parts, self.answer.strip()])


def find_rubric(named: str, base: Path) -> Path:
    """The file of a rubric.

    Args:
        named: A path, or the name of a rubric that comes with the package (`quality_v1`), also
            spelled as its path in the checkout (`configs/rubrics/quality_v1.toml`).
        base: Directory that a relative path starts from; a file there comes first.

    Raises:
        ConfigError: There is no such rubric (E-CONFIG-MISSING).
    """
    known = {path.stem: path for path in sorted(CONFIGS.glob("rubrics/*.toml"))}
    spelled = {f"configs/rubrics/{path.name}": path for path in known.values()}
    path = base / named
    if path.is_file():
        return path
    if named in known | spelled:
        return (known | spelled)[named]
    raise ConfigError(
        "no such rubric",
        where="[oracle] rubric",
        found=path,
        expected=f"a TOML file, or one of {', '.join(known)}",
        code="E-CONFIG-MISSING",
    )
