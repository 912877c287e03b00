"""Grades and calibrations are believed as they were committed, or refused in one line."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from loader.files.sealed import sealed
from nmoe_core.base.errors import CalibrationError, FormatError, NmoeError
from nmoe_core.calibration.calibrate import calibrate_compat
from nmoe_core.calibration.files import load_calibration
from nmoe_core.calibration.graded import PartialRows, Tally, read_graded, read_grading_summary
from nmoe_core.calibration.rows import rows_from_predictions
from nmoe_core.config.tree import Tree
from nmoe_core.curate.shards.inputs import load_quality
from nmoe_core.labels.files import read_labels
from nmoe_core.labels.scores import DIMENSIONS, parse_scores
from tests.core.quality import MAX_CTX

VALID = {
    "weights": dict.fromkeys(DIMENSIONS, 1.0),
    "tau_probe": 0.2,
    "tau_drop": 0.3,
    "tau_keep": 0.5,
    "heads_digest": "h",
}


def flip_decisions(path: Path, count: int = 5) -> None:
    lines = path.read_text().splitlines()
    for i in range(count):
        row = json.loads(lines[i])
        lines[i] = json.dumps(row | {"decision": "keep" if row["decision"] != "keep" else "drop"})
    path.write_text("\n".join(lines) + "\n")


def test_five_decisions_edited_by_hand_are_refused_by_everyone_who_reads_them(own: Any) -> None:
    report = own.grade()
    directory, shard = report.path.parent, Tree.below(own.base).shard("web", 0)
    manifest = own.manifest()
    assert load_quality(shard, manifest).path == report.path
    payload = report.path.read_bytes()
    flip_decisions(report.path)
    readers = (
        lambda: read_graded(directory),
        lambda: load_quality(shard, manifest),
        lambda: rows_from_predictions(report.path, read_labels(own.labels)),
    )
    for reader in readers:
        with pytest.raises(FormatError, match="not those that were graded") as refused:
            reader()
        assert refused.value.code == "E-GRADE-CHANGED"
        assert "\n" not in refused.value.line()
    again = own.grade()
    assert again.facts["changed"], "grading again writes them anew"
    assert report.path.read_bytes() == payload


def test_an_edited_summary_is_refused_and_one_of_an_older_version_opens(own: Any) -> None:
    directory = own.grade().path.parent
    path = directory / "summary.json"
    value = json.loads(path.read_text())
    for edited in (
        value | {"kept": value["kept"] + 1},
        {k: v for k, v in value.items() if k != "content_hash"},
        {k: v for k, v in value.items() if k != "scores_sha256"},
    ):
        path.write_text(json.dumps(edited))
        with pytest.raises(FormatError, match="content_hash") as refused:
            read_grading_summary(directory)
        assert refused.value.code == "E-GRADE-CHANGED"
    new = ("format", "content_hash", "scores_sha256")
    path.write_text(json.dumps({k: v for k, v in value.items() if k not in new}))
    assert read_graded(directory).summary["kept"] == value["kept"]
    assert not own.grade().facts["changed"], "grades of an older version are not made again"


def test_an_edited_calibration_is_refused_and_calibrated_again(own: Any) -> None:
    path = own.calibration / "calibration_summary.json"
    payload = path.read_bytes()
    value = json.loads(payload)
    stripped = {k: v for k, v in value.items() if k != "content_hash"}
    for edited in (value | {"tau_keep": 1.0}, stripped):
        path.write_text(json.dumps(edited))
        with pytest.raises(CalibrationError) as refused:
            own.grade()
        assert refused.value.code == "E-CALIBRATION-CHANGED"
    own.calibrate()
    assert path.read_bytes() == payload


def test_thresholds_of_no_known_heads_grade_only_where_they_are_accepted_by_name(own: Any) -> None:
    calibrate_compat(own.labels, own.calibration, 0.6)
    with pytest.raises(CalibrationError, match="compat: quantiles") as refused:
        own.grade()
    assert refused.value.code == "E-CALIBRATION-HEADS"
    assert not (own.base / "quality").exists()
    report = own.grade(compat=True)
    summary = read_grading_summary(report.path.parent)
    assert summary["calibration_rule"].startswith("compat: quantiles")
    assert summary["calibration_accepted_by"] == "compat"
    own.calibrate()
    assert "calibration_accepted_by" not in read_grading_summary(own.grade(compat=True).path.parent)


@pytest.mark.parametrize(
    "change",
    [
        *({name: value} for name in ("tau_probe", "tau_drop", "tau_keep")
          for value in (float("nan"), float("inf"), -float("inf"), -0.1, 1.1, True, 10**400, [])),
        {"tau_probe": 0.6},
        {"tau_drop": 0.6},
        {"weights": dict.fromkeys(DIMENSIONS, 1.0) | {"density": float("nan")}},
        {"weights": dict.fromkeys(DIMENSIONS, 1.0) | {"density": float("inf")}},
        {"weights": dict.fromkeys(DIMENSIONS, 1.0) | {"density": 10**400}},
        {"weights": dict.fromkeys(DIMENSIONS, True)},
        {"heads_digest": 7},
    ],
)  # fmt: skip
def test_thresholds_and_weights_out_of_range_are_refused(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "calibration_summary.json"
    for value in (VALID | change, sealed(VALID | {"format": "calibration/2"} | change)):
        path.write_text(json.dumps(value))
        with pytest.raises(CalibrationError) as refused:
            load_calibration(tmp_path)
        assert refused.value.code in ("E-CALIBRATION-FORMAT", "E-CALIBRATION-CHANGED")


def mutated(payload: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, removed, doubled or cut off."""
    data = bytearray(payload)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data))
        match rng.randrange(5):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + rng.randint(1, 40)]
            case 2:
                data[at:at] = data[at : at + rng.randint(1, 40)]
            case 3:
                data[at : at + 1] = rng.choice([b"null", b"-1", b"1e999", b'"', b"{", b"\xff"])
            case _:
                data = data[: max(at, 1)]
    return bytes(data)


def test_four_hundred_damaged_calibrations_are_refused_or_equal(own: Any) -> None:
    path = own.calibration / "calibration_summary.json"
    payload, rng = path.read_bytes(), random.Random(0)
    good = load_calibration(own.calibration)
    for _ in range(400):
        path.write_bytes(mutated(payload, rng))
        with contextlib.suppress(NmoeError):
            found = load_calibration(own.calibration)
            assert (found.thresholds, found.weights) == (good.thresholds, good.weights)


def test_three_hundred_damaged_partial_gradings_end_in_the_same_bytes(own: Any) -> None:
    whole = own.grade()
    expected = whole.path.read_bytes(), read_grading_summary(whole.path.parent)
    directory = whole.path.parent
    partial = directory / ".quality_scores.partial.jsonl"
    note = directory / ".quality_scores.partial.json"
    rng = random.Random(1)
    kept_rows, kept_note = _killed(own, whole)
    for turn in range(300):
        (directory / "summary.json").unlink(missing_ok=True)
        whole.path.unlink(missing_ok=True)
        partial.write_bytes(mutated(kept_rows, rng) if turn % 2 else kept_rows)
        note.write_bytes(kept_note if turn % 2 else mutated(kept_note, rng))
        if turn % 10:
            _resume(directory)
            continue
        own.grade()
        assert (whole.path.read_bytes(), read_grading_summary(directory)) == expected


def _killed(own: Any, whole: Any) -> tuple[bytes, bytes]:
    """The partial files of a grading that was killed after its first buffer."""
    append = PartialRows.append

    def killed(self: PartialRows, rows: Any) -> None:
        append(self, rows)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PartialRows, "append", killed)
        patched.setattr("nmoe_core.grading.grade.BUFFER_BATCHES", 1)
        (whole.directory / "summary.json").unlink()
        with pytest.raises(KeyboardInterrupt):
            own.grade()
    rows, note = (whole.directory / f".quality_scores.partial.{end}" for end in ("jsonl", "json"))
    assert len(rows.read_bytes().splitlines()) == 8
    return rows.read_bytes(), note.read_bytes()


def _resume(directory: Path) -> None:
    """A resume takes over all rows or none; what is not as it was noted is cut off."""
    note = directory / ".quality_scores.partial.json"
    try:
        fingerprints = json.loads(note.read_bytes())["fingerprints"]
    except (ValueError, KeyError, TypeError):
        fingerprints = {}
    with PartialRows(directory, fingerprints) as partial:
        rows = partial.resume(Tally(0.0, None))
    assert (directory / ".quality_scores.partial.jsonl").read_bytes().count(b"\n") == rows
    assert rows in (0, 8)


@pytest.mark.parametrize("value", [None, 7, [1], [(1, 2)], "[]", b"{}", ("a",)])
def test_what_is_no_set_of_scores_is_a_label_error(value: Any) -> None:
    from nmoe_core.base.errors import LabelError

    with pytest.raises(LabelError) as refused:
        parse_scores(value)
    assert refused.value.code == "E-LABEL-SCORES"


def test_a_head_whose_header_or_weights_were_edited_is_refused(own: Any) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from nmoe_core.base.errors import HeadError
    from nmoe_core.config.tree import PROBE_NAME
    from nmoe_core.heads.files import HEADER_KEY, load_head, read_header

    path = own.heads / PROBE_NAME
    header, tensors = read_header(path), load_file(str(path))
    name = next(name for name, value in tensors.items() if value.is_floating_point())
    other = tensors | {name: torch.nextafter(tensors[name], torch.tensor(9.0))}
    edited = header | {"scorer_model": "other"}
    bare = {k: v for k, v in header.items() if k != "content_hash"}
    for weights, text in ((other, header), (tensors, edited), (tensors, bare)):
        save_file(weights, str(path), metadata={HEADER_KEY: json.dumps(text)})
        with pytest.raises(HeadError) as refused:
            load_head(path, own.model, MAX_CTX)
        assert refused.value.code == "E-HEAD-CHANGED"
    new = ("content_hash", "tensors_sha256")
    old = {k: v for k, v in header.items() if k not in new} | {"format": "hydra-head/1"}
    save_file(tensors, str(path), metadata={HEADER_KEY: json.dumps(old)})
    load_head(path, own.model, MAX_CTX)
