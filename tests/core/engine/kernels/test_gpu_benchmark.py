"""The benchmark for a GPU runs from end to end on a tiny shape, here without a GPU."""

import importlib.util
import json
import math

import pytest

from benchmarks.gpu.__main__ import PARTS, main

OURS = ("scoring", "steps", "generating")
PEERS = ("generating", "libraries", "transformers", "vllm", "plain")


# FlexAttention is not compiled on a CPU, and says so; nor does Dynamo know of caches.
@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:Dynamo detected")
@pytest.mark.parametrize(
    "parts", [OURS, pytest.param(PEERS, marks=pytest.mark.slow)], ids=["ours", "peers"]
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
        assert len(routes) == 10
        for figure in routes:
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
        assert [f["what"] for f in found["plain path"]] == ["scoring", "scoring, compiled"]
    assert not [path for path in tmp_path.iterdir() if path != out]
    assert set(PARTS) == {*OURS, *PEERS}
