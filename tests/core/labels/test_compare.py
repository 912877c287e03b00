"""Labels of two scorers compared, against scikit-learn and scipy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import cohen_kappa_score

from nmoe_core.base.intervals import concordance, exact_interval
from nmoe_core.labels.compare import compare_labels
from nmoe_core.labels.scores import QUALITY
from tests.project import json_lines, said
from tests.refusals import refused


def labels(grades: np.ndarray, first: int = 0, **more: Any) -> list[dict[str, Any]]:
    return [
        {"doc_id": f"d{first + i}", "source": "web" if (first + i) % 3 else "books", "ok": True,
         "scores": dict(zip(QUALITY.names, row)), **more}
        for i, row in enumerate(grades.tolist())
    ]  # fmt: skip


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(json_lines(rows))
    return path


@pytest.fixture
def grades() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    first = rng.integers(0, 5, (240, 5))
    return first, np.clip(first + rng.integers(-1, 2, first.shape), 0, 4)


def test_agreement_is_that_of_the_libraries_by_dimension_and_source_within_its_interval(
    grades: tuple[np.ndarray, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = grades
    a, b = written(tmp_path / "a", labels(first)), written(tmp_path / "b", labels(second))
    facts = said(capsys, "hydra", "agree", a, b)
    assert facts == compare_labels(a, b)
    assert len(facts["rows"]) == 3 * 6
    member = {"all": np.arange(240) >= 0, "books": np.arange(240) % 3 == 0}
    member["web"] = ~member["books"]
    for row in facts["rows"]:
        x, y = first[member[row["source"]]], second[member[row["source"]]]
        if row["dimension"] == "aggregate":
            x, y = QUALITY.aggregate(x), QUALITY.aggregate(y)
        else:
            i = QUALITY.names.index(row["dimension"])
            x, y = x[:, i], y[:, i]
            kappa = cohen_kappa_score(x, y, weights="quadratic")
            assert row["kappa"] == pytest.approx(kappa, abs=1e-6)
        assert row["kappa_low"] < row["kappa"] < row["kappa_high"]
        assert row["spearman"] == pytest.approx(spearmanr(x, y)[0], abs=1e-6)
        assert row["low"] < row["spearman"] < row["high"]
        assert row["n"] == len(x)
        assert row["second_minus_first"] == pytest.approx((y - x).mean(), abs=1e-6)
        assert row["same"] == pytest.approx((x == y).mean(), abs=1e-6)
    assert concordance(np.ones(9), np.ones(9)) is None


def test_only_documents_with_labels_of_one_text_in_both_files_are_compared(
    grades: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    first, second = (g[:9] for g in grades)
    ours = labels(first, text_sha256="a" * 64)
    theirs = labels(second[:6], 3)
    theirs[0]["text_sha256"] = "b" * 64
    theirs[1] |= {"ok": False}
    theirs[2] |= {"salvaged": True}
    a, b = written(tmp_path / "a", ours), written(tmp_path / "b", theirs)
    facts = compare_labels(a, b)
    counts = {key: facts[key] for key in ("documents", "other_text", "only_in_one")}
    assert counts == {"documents": 3, "other_text": 1, "only_in_one": 5}
    assert [said["left_out"] for said in facts["labels"]] == [0, 2]
    with refused("E-LABEL-COVERAGE", "1 shared ids, with different texts"):
        compare_labels(a, written(tmp_path / "c", theirs[:1]))
    with refused("E-LABEL-COVERAGE", "no shared ids"):
        compare_labels(a, written(tmp_path / "c", labels(first, 90)))
    with refused("E-LABEL-MISSING"):
        compare_labels(a, tmp_path / "none")


def test_a_person_s_labels_need_not_name_the_scale_of_those_that_they_are_compared_with(
    tmp_path: Path,
) -> None:
    rng, scale = np.random.default_rng(2), {"depth": [0, 2, 0.5], "style": [1, 3, 0.5]}
    grades = [{"depth": d, "style": s + 1} for d, s in rng.integers(0, 3, (30, 2)).tolist()]
    rows = [{"doc_id": f"d{i}", "source": "web", "ok": True} for i in range(30)]
    ours = [row | {"scores": g, "scale": scale} for row, g in zip(rows, grades)]
    theirs = [row | {"scores": g} for row, g in zip(rows, grades[:9] + grades[:21])]
    (tmp_path / "labels").mkdir()
    written(tmp_path / "labels" / "scores.jsonl", ours)
    facts = compare_labels(tmp_path / "labels", written(tmp_path / "person.jsonl", theirs))
    found = {row["dimension"]: row for row in facts["rows"] if row["source"] == "all"}
    assert list(found) == ["depth", "style", "aggregate"]
    same = [a == b for a, b in zip(grades, grades[:9] + grades[:21])]
    assert 9 / 30 < np.mean(same) <= found["aggregate"]["same"] < 1


def test_the_grades_of_a_model_are_compared_without_the_corrections_of_a_person(
    grades: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    first, second = (g[:40] for g in grades)
    models = labels(first)
    corrected = [
        row | {"scores": given["scores"], "corrected": {"by": "mara", "was": row["scores"]}}
        for row, given in zip(models, labels(second))
    ]
    of_failed = labels(second[:1], 90)[0] | {"corrected": {"by": "mara", "was": None}}
    person = written(tmp_path / "person", [*labels(second), *labels(second[:1], 90)])
    plain = compare_labels(written(tmp_path / "a", models), person)
    merged = compare_labels(written(tmp_path / "b", [*corrected, of_failed]), person)
    assert merged["rows"] == plain["rows"]
    assert [said["corrected"] for said in merged["labels"]] == [41, 0]


def test_two_labels_of_one_document_in_a_file_are_refused(
    grades: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    ours = written(tmp_path / "a", labels(grades[0][:9]))
    theirs = written(tmp_path / "b", [*labels(grades[1][:9]), *labels(grades[0][:1])])
    with refused("E-LABEL-CORRUPT", naming=["d0", "b:10"]):
        compare_labels(ours, theirs)


def test_two_equal_files_of_labels_say_how_many_documents_may_still_differ(tmp_path: Path) -> None:
    grades = np.random.default_rng(0).integers(0, 5, (30, 5))
    path = written(tmp_path / "a", labels(grades))
    for row in compare_labels(path, path)["rows"]:
        interval = exact_interval(row["n"], row["n"])
        assert (row["same_low"], row["same_high"]) == interval
        assert row["n"] < 15 or row["kappa_low"] < row["kappa_high"] == 1
        assert row["kappa_low"] is None or row["n"] >= 10
