"""Pictures of the outputs of tasks, as PNG bytes that fit inline into Markdown."""

from nmoe_core.report.plots.charts import calibration_plot, copies_plot, loss_plot, manifest_plot
from nmoe_core.report.plots.clusters import (
    cloud_plot,
    compared_plot,
    head_tail_plot,
    k_plot,
    share_plot,
)
from nmoe_core.report.plots.columns import columns_plot, sources_plot
from nmoe_core.report.plots.flow import flow_plot
from nmoe_core.report.plots.heat import heat_plot
from nmoe_core.report.plots.kept import kept_picture
from nmoe_core.report.plots.ordering import ordering_plot
from nmoe_core.report.plots.png import png_markdown

__all__ = [
    "calibration_plot",
    "cloud_plot",
    "columns_plot",
    "compared_plot",
    "copies_plot",
    "flow_plot",
    "head_tail_plot",
    "heat_plot",
    "k_plot",
    "kept_picture",
    "loss_plot",
    "manifest_plot",
    "ordering_plot",
    "png_markdown",
    "share_plot",
    "sources_plot",
]
