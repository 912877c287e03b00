import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nmoe_core.base.errors import ConfigError
from nmoe_core.config.rubric import Rubric
from nmoe_core.labels.scores import QUALITY, Scale, parse_scores, scale_in
from tests.core.small_gradings import RUBRIC
from tests.refusals import refused

GOOD = dict(zip(QUALITY.names, (0, 1, 2, 3, 4)))


TEXT = '{"density": 4, "helpfulness": 0, "correctness": 1.0, "coherence": 2, "complexity": 3}'
NOT_SCORES = [
    {},
    {k: v for k, v in GOOD.items() if k != "density"},
    GOOD | {"verbosity": 2},
    *(GOOD | {"density": bad} for bad in (5, -1, 4.7, True, "4", None, math.nan, math.inf)),
    GOOD | {"density": 10**400},
    *("", "[]", "3", "```json\n{}\n```", "[" * 100_000, TEXT.replace("2", "NaN")),
    *(f"[{TEXT}]", f"{TEXT} {TEXT}", TEXT.replace("{", '{"density": 4, ')),
    *(None, 7, [1], [(1, 2)], b"{}", ("a",)),
]


@pytest.mark.parametrize("value", [GOOD, {name: float(g) for name, g in GOOD.items()}, TEXT])
def test_five_integers_from_0_to_4_are_scores_in_the_order_of_the_rubric(value: Any) -> None:
    scores = parse_scores(value)
    assert list(scores.items()) == list(GOOD.items())
    assert all(type(grade) is int for grade in scores.values())


@pytest.mark.parametrize("value", NOT_SCORES)
def test_anything_else_is_not_a_set_of_scores(value: Any) -> None:
    with refused("E-LABEL-SCORES"):
        parse_scores(value)


def test_the_aggregate_clamps_weighs_and_divides_by_the_weights() -> None:
    assert QUALITY.aggregate(np.array([4, 4, 4, 4, 4])) == 1.0
    assert QUALITY.aggregate(np.array([[-3, 0, 0, 0, 0], [9, 4, 4, 4, 4]])).tolist() == [0.0, 1.0]
    weights = dict(zip(QUALITY.names, (3.0, 1.0, 0.0, 0.0, 0.0)))
    weighted = QUALITY.weighted(weights)
    assert weighted.aggregate(np.array([4, 0, 4, 4, 4])) == 0.75
    row, doubled = np.array([1, 2, 3, 4, 0]), {name: 2 * w for name, w in weights.items()}
    assert weighted.aggregate(row) == QUALITY.weighted(doubled).aggregate(row)


def test_stored_scores_are_clamped_rounded_and_recomputable_from_their_file_form() -> None:
    scores = QUALITY.stored(np.array([[-0.2, -0.0, 1.23456789, 4.5, 3.0]], np.float32))
    assert scores.tolist() == [[0.0, 0.0, 1.234568, 4.0, 3.0]]
    assert not np.signbit(scores).any()
    written = QUALITY.by_name(scores[0])
    assert QUALITY.aggregate(np.array(list(written.values()))) == QUALITY.aggregate(scores)[0]


def test_the_shipped_rubric_has_a_hash_of_every_word(tmp_path: Path, rubric: Rubric) -> None:
    assert [*rubric.dimensions] == list(QUALITY.names)
    assert all(len(d.grades) == 5 for d in rubric.dimensions.values())
    assert all(name in rubric.text() for name in QUALITY.names)
    text = RUBRIC.read_text("utf-8")
    changed = tmp_path / "rubric.toml"
    changed.write_text(text.replace("Serious errors", "Grave errors"))
    assert Rubric.load(changed).hash != rubric.hash
    changed.write_text(text + "\n# a comment\n")
    assert Rubric.load(changed).hash == rubric.hash
    changed.write_text(text.replace("[dimensions.density]", "weight = 2\n[dimensions.density]"))
    assert Rubric.load(changed).hash == rubric.hash  # no word of it reaches an oracle
    for name in ("Density", "decision", "2nd", '"a b"'):
        changed.write_text(text.replace("[dimensions.density]", f"[dimensions.{name}]"))
        with pytest.raises(ConfigError, match="dimension"):
            Rubric.load(changed)


NOT_ROWS = ([], 3, [0, 4], [0, 4, 1.0, 1], [4, 4, 1.0], [0.0, 4, 1.0], [True, 4, 1.0], [0, 4, "1"])


@pytest.mark.parametrize(
    "value",
    [
        *({}, [], "quality", 0),
        *({"depth": [0, 4, 1.0], "style": row} for row in NOT_ROWS),
        *({"depth": [0, 4, weight]} for weight in (-0.1, math.nan, math.inf, None)),
    ],
)
def test_what_is_no_scale_is_refused(value: Any) -> None:
    with refused("E-LABEL-SCORES"):
        scale_in({"scale": value})


def test_a_scale_is_read_as_it_was_written_and_shares_begin_at_its_lowest_grade() -> None:
    scale = Scale(("depth", "style"), (0, 1), (2, 5), (0.0, 1.0))
    written = scale.in_file()
    assert written == {"scale": {"depth": [0, 2, 0.0], "style": [1, 5, 1.0]}}
    assert scale_in(written) == scale
    assert (QUALITY.in_file(), scale_in({})) == ({}, QUALITY)
    assert scale.shares(np.array([1, 2])).tolist() == [1 / 2, 1 / 4]
    assert scale.shares(np.array([-9, 9])).tolist() == [0, 1]
    assert scale.aggregate(np.array([[2, 1], [0, 3]])).tolist() == [0, 1 / 2]
    assert scale.with_same_grades(scale.weighted({"depth": 2, "style": 1}))
    assert not scale.with_same_grades(QUALITY)
    stored = scale.stored(np.array([[-0.0, 2.00000049], [3, 0]]))
    assert stored.tolist() == [[0, 2], [2, 1]]
    assert not np.signbit(stored).any()


def test_weights_of_a_rubric_are_divided_by_their_sum(tmp_path: Path) -> None:
    path, text = tmp_path / "rubric.toml", RUBRIC.read_text("utf-8")
    path.write_text(text.replace("[dimensions.density]", "[dimensions.density]\nweight = 4"))
    scale = Scale.of(Rubric.load(path))
    assert (scale.names, scale.lowest, scale.highest) == (QUALITY.names, (0,) * 5, (4,) * 5)
    assert scale.weights == pytest.approx((*(1 / 8,) * 4, 4 / 8))
