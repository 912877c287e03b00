"""Split expressions: `train`, `train[100:200]`, `train[-1000:]`, `train[:1%]`, `train[10%:20%]`.

Bounds and their rounding are those of the `datasets` library: percentages round to the closest row,
or with `(pct1_dropremainder)` behind the brackets are multiples of a truncated hundredth; a
negative bound counts from the end. Refused, because a split is one range of one split: `a+b`, and
bounds of which one is a number of rows and the other a percentage.
"""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple

from nmoe_core.base.errors import ConfigError

_BOUND = r"-?[0-9][0-9_]*%?"
_SPLIT = re.compile(
    rf"(?P<name>\w[\w.-]*)(?:\[(?P<a>{_BOUND})?:(?P<b>{_BOUND})?\])?(?:\((?P<rounding>[^()]*)\))?",
    re.ASCII,
)
_EXPECTED = "name, name[10:20], name[-20:], name[:1%] or name[:1%](pct1_dropremainder)"

Rounding = Literal["closest", "pct1_dropremainder"]


class Bound(NamedTuple):
    """One end of a range: a number of rows, or a percentage of them."""

    value: int
    is_percent: bool

    def row(self, num_rows: int, rounding: Rounding) -> int:
        """The row number in a split of `num_rows` rows, between 0 and `num_rows`."""
        row = self.value
        if self.is_percent and rounding == "closest":
            row = round(self.value * num_rows / 100.0)
        elif self.is_percent:
            row = self.value * math.trunc(num_rows / 100.0)
        return min(max(row + num_rows, 0) if row < 0 else row, num_rows)


class SplitExpression(NamedTuple):
    """A parsed split expression; a bound that is not given is None."""

    name: str
    start: Bound | None = None
    stop: Bound | None = None
    rounding: Rounding = "closest"

    @property
    def is_whole(self) -> bool:
        """Whether it names all rows of its split."""
        return self.start is None and self.stop is None

    def rows(self, num_rows: int) -> tuple[int, int]:
        """Row range `[start, stop)` of a split of `num_rows` rows; empty where it ends early.

        Raises:
            ConfigError: `pct1_dropremainder` on fewer than 100 rows, which would keep none.
        """
        if self.rounding == "pct1_dropremainder" and num_rows < 100:
            raise ConfigError(
                "pct1_dropremainder needs a split of at least 100 rows",
                where=self.name,
                found=f"{num_rows} rows",
                do="leave the rounding out",
            )
        start = 0 if self.start is None else self.start.row(num_rows, self.rounding)
        stop = num_rows if self.stop is None else self.stop.row(num_rows, self.rounding)
        return start, max(start, stop)


def parse_split(text: str) -> SplitExpression:
    """Parse a split expression.

    Raises:
        ConfigError: It is none, or one of the forms that are refused (E-CONFIG).
    """
    if "+" in text:
        raise _refused("joined splits are not read", text, "make a source of each split")
    match = _SPLIT.fullmatch(text)
    if match is None:
        raise _refused("not a split", text)
    start, stop = _bound(match["a"], text), _bound(match["b"], text)
    percent = {bound.is_percent for bound in (start, stop) if bound is not None}
    if len(percent) > 1:
        raise _refused("one bound is a number of rows, the other a percentage", text)
    return SplitExpression(match["name"], start, stop, _rounding(match["rounding"], percent, text))


def _bound(text: str | None, where: str) -> Bound | None:
    if text is None:
        return None
    is_percent = text.endswith("%")
    digits = text.removesuffix("%")
    if digits.endswith("_") or "__" in digits or len(digits) > 18:
        raise _refused("not a number of rows", where)
    value = int(digits)
    if is_percent and abs(value) > 100:
        raise _refused("percentage is out of range", where, "use -100% to 100%")
    return Bound(value, is_percent)


def _rounding(text: str | None, percent: set[bool], where: str) -> Rounding:
    if text is None:
        return "closest"
    if percent != {True}:
        raise _refused("a rounding needs percentages", where)
    if text != "closest" and text != "pct1_dropremainder":
        raise _refused("no such rounding", where, "use closest or pct1_dropremainder")
    return text


def _refused(what: str, text: str, do: str | None = None) -> ConfigError:
    return ConfigError(what, found=repr(text[:200]), expected=_EXPECTED, do=do)
