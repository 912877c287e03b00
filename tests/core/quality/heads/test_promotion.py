from pathlib import Path
from typing import Any

import pytest

from nmoe_core.config.run import Run
from nmoe_core.labels.scores import QUALITY
from nmoe_core.quality.heads.head_files import save_head
from nmoe_core.quality.heads.models import Probe
from nmoe_core.quality.heads.shapes import ProbeArch
from nmoe_core.tasks.checks import check_head

GOOD: dict[str, Any] = {
    "n": 150,
    "num_failed": 0,
    "spearman": 0.6,
    "spearman_ci95": [0.5, 0.7],
    "spearman_source_only": 0.3,
    "spearman_length_only": 0.2,
    "mae": dict.fromkeys(QUALITY.names, 0.5),
    "mae_mean_only": dict.fromkeys(QUALITY.names, 0.6),
}


@pytest.mark.parametrize(
    ("changed", "expected", "checks"),
    [
        ({}, set(), ""),
        # The estimate is what it was; only the bound says that this may be chance.
        ({"spearman_ci95": [-0.01, 0.9]}, {"promotion", "baselines"}, ""),
        ({"spearman_ci95": [0.0, 0.9]}, {"promotion", "baselines"}, ""),
        ({"n": 99}, {"promotion"}, ""),
        ({"num_failed": 2}, {"promotion"}, ""),
        ({"num_failed": 1}, set(), ""),
        ({"spearman_source_only": 0.55}, {"baselines"}, ""),
        ({"spearman_length_only": 0.55}, {"baselines"}, ""),
        ({"spearman_student": 0.55}, {"baselines"}, ""),
        ({"spearman_student": 0.45}, set(), ""),
        ({"spearman_source_only": None, "spearman_length_only": None}, set(), ""),
        ({"mae": GOOD["mae"] | {"density": 0.61}}, {"baselines"}, ""),
        ({"spearman": None, "spearman_ci95": None}, {"promotion", "baselines"}, ""),
        ({}, set(), "min_spearman = 0.49"),
        ({}, {"promotion"}, "min_spearman = 0.5"),
        ({"n": 30}, set(), "min_val_documents = 30"),
        ({"num_failed": 9}, set(), "max_nonfinite_share = 0.06"),
        (None, {"promotion", "baselines"}, ""),  # it was never measured
    ],
)
def test_a_head_is_promoted_by_the_lower_bound_of_its_agreement(
    tmp_path: Path, changed: dict[str, Any] | None, expected: set[str], checks: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'root = "out"\n[checks]\n{checks}\n')
    run, metrics = Run(path), {} if changed is None else GOOD | changed
    save_head(run.tree.probe, Probe(ProbeArch(8)), {"metrics": metrics})
    verdicts = check_head(run, "probe")
    assert {name for name, verdict in verdicts.items() if not verdict.passed} == expected
