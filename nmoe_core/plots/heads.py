"""Loss of the heads in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from nmoe_core.plots.png import SERIES, count_axis, render, say_empty

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def loss_plot(curves: Mapping[str, Sequence[Sequence[float]]]) -> bytes:
    """Loss against step, a line for each curve.

    Args:
        curves: Points `(step, loss)` of each named curve, in order.
    """

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.set_title("Training loss")
        points = {name: np.asarray(curve, float).reshape(-1, 2) for name, curve in curves.items()}
        if not any(len(curve) for curve in points.values()):
            say_empty(axes, "no step was taken")
            return
        for k, (name, curve) in enumerate(points.items()):
            marker = "o" if len(curve) == 1 else ""
            color = SERIES[k % len(SERIES)]
            label = f"{name}: {curve[-1, 1]:.4g} at the end" if len(curve) else name
            axes.plot(curve[:, 0], curve[:, 1], color=color, marker=marker, label=label)
        losses = np.concatenate([curve[:, 1] for curve in points.values()])
        # Within one power of ten a log axis has no room for labels but one.
        if 0 < 10 * losses.min() <= losses.max():
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            # Between powers of ten only 2 and 5 have room for a label.
            axes.yaxis.set_minor_formatter(
                lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else ""
            )
        axes.set(xlabel="step", ylabel="loss")
        count_axis(axes.xaxis)
        axes.legend()

    return render(draw, 320)
