"""An import, or a call for help, loads no package that it can do without."""

import sys

import pytest

from tests.project import output_of

HELP = "from nmoe_core.cli import build_parser\nbuild_parser().format_help()\n"
TABULAR = "pyarrow datasets torch fsspec"
MANY = "torch dagster sklearn datasets matplotlib pandas"
HEAVY = "torch sklearn datasets matplotlib safetensors transformers"
PLOT = "nmoe_core.report.plots.loss_plot({'probe': [[1, 0.5]]})"
LABELS = "import nmoe_core.quality.calibration.graded, nmoe_core.quality.calibration.thresholds"
LABELS += ", nmoe_core.config.rubric, nmoe_core.engine.weights.config\n"
LABELS += "from nmoe_core.labels import agreement, label, label_files, slices\n"
LABELS += "import nmoe_core.labels.oracles.heuristic"


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import loader, loader.__main__", "torch dagster nmoe_core pydantic"),
        ("import nmoe_core", "numpy pyarrow datasets torch tiktoken pydantic"),
        ("import nmoe.data", "numpy pyarrow datasets torch tiktoken pydantic nmoe_core"),
        ("from nmoe_core import HuggingFaceSource, ParallelPrepPipeline, IndexReader", TABULAR),
        (f"{HELP}import nmoe_core.prep.run, nmoe_core.prep.mixture", MANY),
        (LABELS, "torch"),
        ("import nmoe_core.report.plots", "matplotlib torch"),
        (f"import nmoe_core.report.plots\n{PLOT}", "matplotlib.pyplot torch"),
        ("import nmoe_assets.definitions", HEAVY),
    ],
)
def test_an_import_loads_no_package_that_it_can_do_without(code: str, heavy: str) -> None:
    code += f"\nimport sys\nprint(*(set({heavy.split()}) & sys.modules.keys()))"
    assert output_of(sys.executable, "-c", code) == "\n"
