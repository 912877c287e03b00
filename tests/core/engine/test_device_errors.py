"""A GPU whose memory runs out, or that is lost, in the middle of work."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nmoe_core.base.errors import device_errors
from nmoe_core.cli import main
from nmoe_core.engine import Transformer
from nmoe_core.quality.heads import fit
from nmoe_core.quality.heads.models import Judge
from tests.core.quality.grading.small_run import TINY, labelled_run, nmoe
from tests.project import Project, contents, json_lines
from tests.refusals import refused, refused_line

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has none.")
LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@contextmanager
def failing_at(
    k: int, error: Exception, model: type = Transformer, call: str = "forward"
) -> Iterator[list[int]]:
    """Call `k` of a model's method, from 1, raises; yields the numbers of the calls made."""
    real, made = getattr(model, call), []

    def counted(*arguments: Any, **options: Any) -> Any:
        made.append(len(made) + 1)
        if len(made) == k:
            raise error
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, call, counted)
        yield made


@pytest.fixture
def labelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Project]:
    """Makes a labelled project of so many documents, whose work is committed after each batch."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setattr(fit, "SAVE_INTERVAL_S", 0.0)
    monkeypatch.setattr("nmoe_core.quality.kept_states.PART_TOKENS", 256)
    monkeypatch.setattr("nmoe_core.quality.grading.grade.BUFFER_BATCHES", 1)
    judge = TINY["heads"]["judge"] | {"epochs": 2, "batch_size": 16}
    heads = TINY["heads"] | {"probe": {"epochs": 2}, "judge": judge}
    grading = {"batch_size": 8}
    settings = TINY | {"heads": heads, "grading": grading}
    return lambda count: labelled_run(tmp_path, count, settings)


WORK = (
    ("train probe", Transformer, "forward"),
    ("train judge", Judge, "forward_with_teacher"),
    ("hydra calibrate", Transformer, "forward"),
    ("hydra grade", Transformer, "forward"),
)


@pytest.mark.parametrize("work", [WORK[:1], pytest.param(WORK, marks=pytest.mark.slow)])
def test_a_device_failure_is_one_error_and_the_next_run_resumes(
    labelled: Callable[[int], Project],
    capsys: pytest.CaptureFixture[str],
    work: Sequence[tuple[str, type, str]],
) -> None:
    project = labelled(280 if work == WORK else 120)
    out, config = project.directory / "out", str(project.config)
    for words, model, call in work:
        before = contents(out).keys()
        with failing_at(0, FULL, model, call) as calls:
            nmoe(project, words)
        made, count, third = contents(out), len(calls), len(calls) // 3
        for path in made.keys() - before:
            (out / path).unlink()
        # After the first, a shard may be left that has few documents.
        for k, error, code in ((third, FULL, "E-DEVICE-MEMORY"), (1, LOST, "E-DEVICE-LOST")):
            with failing_at(k, error, model, call):
                line = refused_line(capsys, *words.split(), "--config", config, code=code)
            assert str(error)[:60] in line
        with failing_at(0, FULL, model, call) as calls:
            nmoe(project, words)
        after = contents(out)
        for name in {*made, *after}:  # times, and which batches the last part of a grading ran
            if name.endswith(("cost.json", ".batches.json")):
                del made[name], after[name]
        assert after == made, words
        # Calibration commits at its end alone.
        assert (len(calls) < count) == (words != "hydra calibrate"), words


def test_the_error_of_another_process_is_known_by_its_text() -> None:
    text = "AcceleratorError: CUDA error: unspecified launch failure"
    for error, code in (
        (RuntimeError(text), "E-DEVICE-LOST"),
        (RuntimeError("Triton Error [CUDA]: device-side assert triggered"), "E-DEVICE-LOST"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "E-DEVICE-MEMORY"),
        (MemoryError(), "E-DEVICE-MEMORY"),
    ):
        with refused(code), device_errors():
            raise error


def test_completions_resume_after_a_device_failure(
    tmp_path: Path, tiny_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, whole, out = (tmp_path / name for name in ("in.jsonl", "whole.jsonl", "out.jsonl"))
    source.write_text(json_lines({"id": f"p{i}", "tokens": [i, i + 1]} for i in range(12)))
    words = ["generate", str(source), "--checkpoint", str(tiny_dir), "--max-tokens", "3"]
    words += ["--batch-size", "2", "--quiet", "-o"]
    with failing_at(0, FULL, call="extend") as all_calls:
        assert main([*words, str(whole)]) == 0
    with failing_at(len(all_calls) // 2, FULL, call="extend"):
        refused_line(capsys, *words, str(out), code="E-DEVICE-MEMORY")
    assert 0 < len(out.read_bytes()) < len(whole.read_bytes())
    assert main([*words, str(out)]) == 0
    assert out.read_bytes() == whole.read_bytes()


def test_another_error_of_the_runtime_is_not_taken_for_one_of_a_device(
    tmp_path: Path, tiny_dir: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "a", "tokens": [1]}\n')
    words = ["generate", str(tmp_path / "in.jsonl"), "--checkpoint", str(tiny_dir), "-o"]
    with (
        failing_at(1, RuntimeError("shapes do not fit"), call="extend"),
        pytest.raises(RuntimeError, match="shapes do not fit"),
    ):
        main([*words, str(tmp_path / "out.jsonl")])
