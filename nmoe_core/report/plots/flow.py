"""The flow chart of the account: the numbers of files, documents and tokens that each step removes
and adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nmoe_core.report.plots.png import BLUE, GREEN, ORANGE, drawable, render

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {"total": BLUE, "out": ORANGE, "in": GREEN}
_LINE_PX = 23
_MARGIN_PX = 50


def flow_plot(lines: Sequence[Mapping[str, Any]]) -> bytes:
    """One bar per line of the account, from top to bottom: `name`, `unit`, `kind` and `count`, as
    `nmoe_core.tasks.report.account` makes them. Bars of the same unit share a scale."""
    flows = [line for line in lines if line["kind"] != "of"]
    shown = [line for line in flows if line["count"] or line["kind"] == "total"]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.set_title("files, documents and tokens from sources to training")
        largest: dict[str, int] = {}
        for line in shown:
            largest[line["unit"]] = max(largest.get(line["unit"], 1), line["count"] or 0)
        end = 0.0
        for number, line in enumerate(shown):
            kind = line["kind"]
            width = (line["count"] or 0) / largest[line["unit"]]
            start = {"total": 0.0, "out": end - width, "in": end}[kind]
            end = start + width if kind != "out" else start
            axes.barh(number, width, left=start, height=0.8, color=_COLORS[kind])
            sign = {"total": "", "out": "\u2212 ", "in": "+ "}[kind]
            count = "not known" if line["count"] is None else f"{line['count']:,}"
            axes.text(start + width + 0.01, number, sign + count, va="center", fontsize=8)
        names = [drawable(line["name"]) for line in shown]
        axes.set_yticks(range(len(shown)), names, fontsize=8)
        axes.set(xlim=(0, 1.2), ylim=(len(shown) - 0.4, -0.6), xticks=[])
        axes.grid(visible=False)
        axes.spines["bottom"].set_visible(False)

    return render(draw, _LINE_PX * len(shown) + _MARGIN_PX)
