"""The benchmark for a GPU runs from end to end on a tiny shape, here without a GPU."""

import importlib.util
import json
import math
import tomllib

import pytest

from benchmarks.gpu import experts
from benchmarks.gpu.__main__ import PARTS, main
from nmoe_core.engine import make_tiny_checkpoint

OURS = ("scoring", "steps", "generating")
PEERS = ("generating", "libraries", "transformers", "vllm", "plain")


# FlexAttention is not compiled on a CPU, and says so; nor does Dynamo know of caches.
@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:Dynamo detected")
@pytest.mark.parametrize(
    "parts",
    [pytest.param(OURS, marks=pytest.mark.long), pytest.param(PEERS, marks=pytest.mark.slow)],
    ids=["ours", "peers"],
)
def test_every_figure_is_found_and_has_its_share_of_the_device_s_limits(tmp_path, parts):
    if "transformers" in parts:
        pytest.importorskip("transformers")
    out = tmp_path / "figures.json"
    options = ["--shape", "tiny", "--device", "cpu", "--directory", str(tmp_path)]
    found = main([*options, "--out", str(out), "--only", *parts])
    assert json.loads(out.read_text()) == json.loads(json.dumps(found))
    assert found["failures"] == {}
    assert found["machine"]["copy_tb_per_s"] > 0
    assert found["machine"]["matrix_tflop_per_s"] > 0
    if "scoring" in parts:
        assert [figure["blocks"] for figure in found["scoring"]] == [2, 1]
        assert all(figure["share_of_matrix_rate"] > 0 for figure in found["scoring"])
    for batch in (1, 2):
        for name, part in (("step", "steps"), ("generating", "generating")):
            if part in parts:
                # A step's time is the difference of two runs, which a busy machine turns round.
                share = found[f"{name}, batch {batch}"]["share_of_copy_bandwidth"]
                assert math.isfinite(share)
                assert share != 0
    if "libraries" in parts:
        routes = found["experts by route"] + found["attention by route"]
        assert len(routes) == 3 * 4 + 2 * 2 + 1
        assert [figure["route"] for figure in routes if "skipped" in figure] == ["hub"]
        for figure in (one for one in routes if "skipped" not in one):
            assert figure["distance"] < 0.02, figure
            assert figure["share_of_roofline"] > 0
    if "transformers" in parts:
        for setting in ("grouped_mm", "eager"):
            figures = {figure["what"]: figure for figure in found[f"transformers {setting}"]}
            assert list(figures) == ["scoring", "decoding, batch 1", "decoding, batch 2"]
            assert all(figure["ours_over_it"] > 0 for figure in figures.values())
        for name, package in (("transformers triton_kernels", "kernels"), ("vllm", "vllm")):
            if importlib.util.find_spec(package) is None:
                assert found[name] == {"skipped": f"not installed: {package}"}
        assert found["plain path"]["what"] == "scoring"
    assert not [path for path in tmp_path.iterdir() if path != out]
    assert set(PARTS) == {*OURS, *PEERS}


def test_a_fast_wrong_way_is_not_advised():
    distances = {"packed": 0.0, "grouped": 0.01, "hub": 0.3}
    figures = [
        {"what": "experts, 1 rows", "route": route, "milliseconds": 3 - i, "distance": distance}
        for i, (route, distance) in enumerate(distances.items())
    ]
    skipped = {"what": "experts", "route": "hub", "skipped": "not installed"}
    assert experts.advice([skipped, *figures]) == [
        'moe_backend = "grouped"    # fastest for experts, 1 rows'
    ]


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_ways_of_multiplying_by_experts_are_timed_and_the_fastest_named(tmp_path, capsys, family):
    directory = make_tiny_checkpoint(tmp_path / "checkpoint", family=family, vocab_size=300)
    arguments = [str(directory), "--rows", "20", "1", "--device", "cpu", "--rounds", "1"]
    skipped, *figures = experts.main(arguments)
    assert skipped["route"] == "hub"
    assert "does not support this model on this device" in str(skipped["skipped"])
    is_packed = family == "gpt_oss"
    settings = ["packed"] * is_packed + ["decoded", "grouped"]
    routes = [*settings, *["packed, batch-invariant"] * is_packed]
    assert [(f["what"], f["route"]) for f in figures] == [
        (f"experts, {rows} rows", route) for rows in (20, 1) for route in routes
    ]
    assert all(figure["distance"] < 0.02 for figure in figures)
    lines = capsys.readouterr().out.splitlines()[-2:]
    for line, first in zip(lines, (0, len(routes)), strict=True):
        some = figures[first : first + len(settings)]
        best = min(some, key=lambda figure: figure["milliseconds"])
        assert tomllib.loads(line) == {"moe_backend": best["route"]}
