"""Pictures of what the stages made, as PNG bytes that fit inline into Markdown."""

from __future__ import annotations

from nmoe_core.plots.calibration import calibration_plot
from nmoe_core.plots.curation import curated_plot
from nmoe_core.plots.heads import loss_plot
from nmoe_core.plots.png import png_markdown
from nmoe_core.plots.shards import manifest_plot

__all__ = ["calibration_plot", "curated_plot", "loss_plot", "manifest_plot", "png_markdown"]
