import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader import ConfigError, resolve_stages
from loader.plan.mixture import quotas, temper, weights_fixed_point
from tests.refusals import refused

MIXTURE = """
[profiles]
pretrain_profile = "web6"
[mixtures.web6]
total_tokens_b = 5930.0
sample_temperature = 1.0
[[mixtures.web6.sources]]
id = "common_crawl"
tokens_b = 4510.0
percent = 76.05
hf_dataset = "a/b"
[[mixtures.web6.sources]]
id = "wiki"
tokens_b = 2.51
kind = "jsonl"
[mixtures.mid1]
total_tokens_b = 100.0
[[mixtures.mid1.sources]]
id = "wiki"
tokens_b = 30
[[mixtures.mid1.sources]]
id = "math"
tokens_b = 70
[[mixtures.mid1.sources]]
id = "off"
tokens_b = 0
[mixtures.long1]
total_tokens_b = 50.0
[[mixtures.long1.sources]]
id = "books"
tokens_b = 50.0
"""
WEB6 = "mixture = { pretrain = 'web6' }"
ALL = '{ pretrain = "web6", mid = "mid1", long = "long1" }'
FLOWS = f"""
[flow.dev]
mode = "dev"
stages = ["pretrain"]
tokens_b = 0.1
sample_temperature = 1.0
[flow.dev.mixture]
pretrain = "web6"
[flow.research]
tokens_b = 1.0
mixture = {{ pretrain = "web6" }}
[flow.proxy]
stages = ["pretrain", "mid"]
tokens_b_ratio = 400
mixture = {{ mid = "mid1", pretrain = "web6" }}
[flow.full_train]
scale = 1.0
mixture = {ALL}
[flow.plain]
mixture = {ALL}
[flow.tenth]
scale = 0.1
mixture = {ALL}
[flow.override]
tokens_b = 3.0
tokens_b_override = {{ mid = 0.25 }}
mixture = {{ pretrain = "web6", mid = "mid1" }}
[flow.hot]
tokens_b = 1.0
sample_temperature = 2.0
mixture = {{ mid = "mid1" }}
[profiles.mini]
flow = "dev"
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "mix.toml").write_text(MIXTURE)
    (tmp_path / "flows.toml").write_text(FLOWS)
    return tmp_path / "mix.toml", tmp_path / "flows.toml"


@pytest.mark.parametrize(
    ("flow", "expected"),
    [
        ("dev", [("pretrain", 100_000_000)]),
        ("research", [("pretrain", 1_000_000_000)]),
        *(
            (flow, [("pretrain", 5930 * 10**9), ("mid", 10**11), ("long", 50 * 10**9)])
            for flow in ("full_train", "plain")
        ),
        ("tenth", [("pretrain", 593 * 10**9), ("mid", 10**10), ("long", 5 * 10**9)]),
        ("override", [("pretrain", 3 * 10**9 * 5930 // 6030), ("mid", 250_000_000)]),
        ("proxy", [("pretrain", 800 * 10**9 * 5930 // 6030), ("mid", 800 * 10**11 // 6030)]),
    ],
)
def test_flows_give_their_exact_budgets_in_stage_order(files, flow, expected):
    stages = resolve_stages(*files, flow, active_params_b=2)
    assert [(stage.name, stage.num_tokens) for stage in stages] == expected


def test_weights_are_the_sizes_and_a_flows_temperature_overrides_the_mixtures(files):
    (stage,) = resolve_stages(*files, "dev")
    assert stage.mixture == "web6"
    assert [(s.name, s.weight) for s in stage.sources] == [("common_crawl", 4510.0), ("wiki", 2.51)]
    (stage,) = resolve_stages(*files, "hot")
    weights = [source.weight for source in stage.sources]
    assert weights[0] / weights[1] == pytest.approx(math.sqrt(30 / 70))
    assert weights[2] == 0.0
    heated = MIXTURE.replace("total_tokens_b = 100.0", "total_tokens_b = 1\nsample_temperature = 4")
    files[0].write_text(heated)
    files[1].write_text("[flow.x]\nmixture = { mid = 'mid1' }")
    (stage,) = resolve_stages(*files, "x")
    assert stage.sources[0].weight / stage.sources[1].weight == pytest.approx((3 / 7) ** 0.25)


def test_temperature_is_a_power_that_keeps_zero_and_scale():
    assert temper([3, 0, 5.5], 1.0) == [3, 0, 5.5]
    assert temper([1e300, 0, 1e298], 2.0) == pytest.approx([1, 0, 0.1])
    with pytest.raises(ConfigError, match="turns a positive weight into zero"):
        temper([1.0, 1e-9], 0.01)


def test_fixed_point_weights_are_millionths_and_never_vanish():
    found = weights_fixed_point([4510, 805, 409, 151, 2.51])
    assert found == [767_332, 136_963, 69_587, 25_691, 427]
    assert weights_fixed_point([1.0, 1e-12, 0.0]) == [1_000_000, 1, 0]


def test_largest_remainder_gives_ties_to_the_earlier_source():
    assert quotas(10, [1, 1, 1]) == [4, 3, 3]
    assert quotas(2, [1, 1, 1]) == [1, 1, 0]
    assert quotas(10, [0.7, 0.3]) == [7, 3]
    assert quotas(10, [0.1] * 10) == [1] * 10
    assert quotas(1000, [4510, 805, 409, 151, 2.51]) == [767, 137, 70, 26, 0]
    assert quotas(7, [0, 1, 0, 2]) == [0, 2, 0, 5]
    # Percent of The Pile, of a GPT-3 like mixture and of Falcon 40B in the mixture document.
    for percent in ([24, 9, 4, 63], [73, 5, 2.4, 2.4, 17.2], [75, 6, 5, 14]):
        assert quotas(1000, [p / 100 for p in percent]) == [10 * p for p in percent]


@settings(max_examples=80)
@given(
    st.integers(0, 10**13),
    st.lists(st.floats(0, 1e6), min_size=1, max_size=12).filter(lambda w: sum(w) > 1e-3),
)
def test_quotas_sum_to_the_stage_and_are_within_one_of_the_share(n, weights):
    shares = quotas(n, weights)
    assert sum(shares) == n
    total = math.fsum(weights)
    for share, weight in zip(shares, weights):
        assert abs(share - n * weight / total) < 1 + n * 1e-14
        assert weight > 0 or share == 0


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('id = "math"', 'id = "wiki"', ["'wiki'", "twice"]),
        ("tokens_b = 70", "tokens_b = true", ["True", "tokens_b"]),
        *(
            ("tokens_b = 70", f"tokens_b = {value}", [value])
            for value in ("-70", "nan", "inf", "'70'")
        ),
        ("tokens_b = 70", "token_b = 70", ["tokens_b is missing", "token_b"]),
        *(('id = "math"', f"id = {value}", [value]) for value in ("'../math'", "'a#b'", "''")),
        ("total_tokens_b = 100.0", "total_token_b = 1", ["'total_token_b'", "'total_tokens_b'"]),
        ("total_tokens_b = 100.0", "total_tokens_b = 0", ["total_tokens_b", "0"]),
        ("total_tokens_b = 100.0", "sample_temperature = 0.0", ["sample_temperature"]),
        ("[mixtures.mid1]", "[mixtures.mid_1]", ["mixtures.mid_1"]),
        ("[mixtures.mid1]", "[mixtures.mid1", ["TOML"]),
    ],
)
def test_wrong_mixtures_are_refused_by_file_and_value(files, old, new, words):
    assert MIXTURE.count(old) == 1
    files[0].write_text(MIXTURE.replace(old, new))
    with refused("E-CONFIG", naming=[*words, "mix.toml"]):
        resolve_stages(*files, "dev")


@pytest.mark.parametrize(
    ("flow", "words"),
    [
        ("mixture = { pretrain = 'web7' }", ["'web7'", "did you mean 'web6'", "mix.toml"]),
        ("mixture = { pretrian = 'web6' }", ["'pretrian'", "'pretrain'"]),
        ("tokens_b = 1", ["mixture"]),
        ("tokens_b = 0\n" + WEB6, ["tokens_b", "0"]),
        ("tokens_b = 1\nscale = 1\n" + WEB6, ["tokens_b and scale"]),
        ("token_b = 1\n" + WEB6, ["'token_b'", "did you mean 'tokens_b'"]),
        ("stages = ['pretrain', 'mid']\n" + WEB6, ["stages", "disagree"]),
        ("tokens_b = 1e-10\n" + WEB6, ["no tokens"]),
        ("tokens_b_override = { mid = 1 }\n" + WEB6, ["'mid'", "tokens_b_override"]),
        ("sample_temperature = -1\n" + WEB6, ["sample_temperature"]),
    ],
)
def test_wrong_flows_are_refused_by_file_and_value(files, flow, words):
    with refused("E-CONFIG", naming=["did you mean 'research'", "flows.toml"]):
        resolve_stages(*files, "reserch")
    files[1].write_text(f"[flow.x]\n{flow}\n")
    with refused("E-CONFIG", naming=words):
        resolve_stages(*files, "x")


def test_ratio_needs_active_params(files):
    with pytest.raises(ConfigError, match="active_params_b is missing"):
        resolve_stages(*files, "proxy")
    for wrong in (0, -1, math.nan, "2"):
        with pytest.raises(ConfigError, match="active_params_b"):
            resolve_stages(*files, "proxy", wrong)


def test_missing_or_unreadable_file_is_one_error(files, tmp_path):
    with refused("E-CONFIG-MISSING"):
        resolve_stages(tmp_path / "nope.toml", files[1], "dev")
    for text in (b"\xff\xfe", b"a = " + b"[" * 5000, b"a = 1\na = 2", b"a = " + b"9" * 5000):
        files[0].write_bytes(text)
        with pytest.raises(ConfigError, match="not valid TOML"):
            resolve_stages(*files, "dev")
