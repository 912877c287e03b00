from __future__ import annotations

import base64
import io
import subprocess
import sys

import matplotlib
import matplotlib.image
import numpy as np
import pytest

from nmoe_core.curate.lineage import ArrangedDocuments
from nmoe_core.plots import (
    calibration_plot,
    curated_plot,
    loss_plot,
    manifest_plot,
    png_markdown,
)
from nmoe_core.plots.png import MAX_PNG_BYTES, short_count

SUMMARY = {
    "keep_curve": [[k / 100, 1 - k / 100] for k in range(1, 100)],
    "tau_drop": 0.3,
    "tau_keep": 0.6,
    "reliability": [
        {"judge_mean": k / 10, "oracle_mean": k / 11, "oracle_keep_rate": float(k > 5)}
        for k in range(1, 11)
    ],
    "count": 200,
}


def arranged(num_documents: int, num_topics: int) -> ArrangedDocuments:
    rng = np.random.default_rng(0)
    topics = rng.integers(0, num_topics, num_documents)
    tokens = rng.lognormal(5, 1, num_documents).astype(np.int64) + 2
    return ArrangedDocuments(topics, tokens, np.argsort(topics, kind="stable"))


def lengths(num_documents: int) -> np.ndarray:
    return np.random.default_rng(1).lognormal(6, 1.3, num_documents).astype(np.int64) + 1


DRAWINGS = {
    "manifest": lambda: manifest_plot(lengths(5000), [70, 0, 80], "web"),
    "manifest of many shards": lambda: manifest_plot(lengths(5000), lengths(1024)),
    "manifest of one document": lambda: manifest_plot([7], [7]),
    "manifest of nothing": lambda: manifest_plot([], [0, 0]),
    "manifest without shards": lambda: manifest_plot([], []),
    "calibration": lambda: calibration_plot(SUMMARY),
    "curated": lambda: curated_plot(arranged(500, 12), 2048),
    "curated, large": lambda: curated_plot(arranged(100_000, 1000), 512),
    "curated, one document": lambda: curated_plot(arranged(1, 1), 4096),
    "curated, nothing kept": lambda: curated_plot(arranged(0, 1), 4096),
    "loss": lambda: loss_plot({"probe": [[1, 0.5], [2, 0.1]], "judge": [[1, 0.4], [9, 0.2]]}),
    "loss of one step": lambda: loss_plot({"probe": [[1, 0.5]]}),
    "loss that reaches zero": lambda: loss_plot({"probe": [[1, 0.5], [2, 0.0]]}),
    "loss of nothing": lambda: loss_plot({"probe": []}),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_pictures_are_small_pngs_of_800_pixels_with_the_same_bytes_each_time(name: str):
    png = DRAWINGS[name]()
    pixels = matplotlib.image.imread(io.BytesIO(png), format="png")
    assert pixels.shape[1] == 800
    assert 300 <= pixels.shape[0] <= 500
    assert len(png) <= MAX_PNG_BYTES
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 2
    assert DRAWINGS[name]() == png


def test_settings_of_the_user_neither_reach_the_picture_nor_change():
    plain = loss_plot({"probe": [[1, 0.5], [2, 0.1]]})
    with matplotlib.rc_context({"figure.facecolor": "red", "font.size": 30, "savefig.dpi": 20}):
        before = dict(matplotlib.rcParams)
        assert loss_plot({"probe": [[1, 0.5], [2, 0.1]]}) == plain
        assert dict(matplotlib.rcParams) == before


def test_pictures_need_no_pyplot_and_importing_them_no_matplotlib():
    code = (
        "import sys, nmoe_core.plots as plots\n"
        "assert 'matplotlib' not in sys.modules\n"
        "plots.loss_plot({'probe': [[1, 0.5]]})\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_picture_shows_its_numbers():
    assert DRAWINGS["curated"]() != curated_plot(arranged(500, 11), 2048)
    assert DRAWINGS["calibration"]() != calibration_plot(SUMMARY | {"tau_keep": 0.61})
    assert manifest_plot([5, 6], [11]) != manifest_plot([5, 7], [12])


def test_markdown_holds_the_picture_inline():
    text = png_markdown(b"\x89PNG", "order [web]\nbefore")
    head, data = text.split("base64,")
    assert head == "![order (web) before](data:image/png;"
    assert base64.b64decode(data.removesuffix(")")) == b"\x89PNG"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (2000, "2k"), (3_140_000, "3.14M"), (1.5e9, "1.5B"), (2e12, "2T")],
)
def test_counts_are_written_short(value: float, text: str):
    assert short_count(value) == text
