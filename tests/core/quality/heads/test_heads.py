import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from nmoe_core.config.tree import JUDGE_NAME, PROBE_NAME
from nmoe_core.engine import Transformer
from nmoe_core.quality.heads.convert import import_pickle
from nmoe_core.quality.heads.features import batches, count_nonfinite, pooled
from nmoe_core.quality.heads.head_files import load_head, read_header
from nmoe_core.quality.heads.models import Judge, Probe
from nmoe_core.quality.heads.scores import DocumentTokens, require_few_failed
from nmoe_core.quality.heads.scoring import load_heads
from nmoe_core.quality.heads.shapes import JudgeArch, ProbeArch
from tests.core.small_gradings import MAX_CTX, random_documents, write_head
from tests.refusals import refused

LENGTHS = torch.tensor([7, 3, 1])


@pytest.fixture
def hidden() -> torch.Tensor:
    torch.manual_seed(3)
    return 5 * torch.randn(3, 7, 32)


@pytest.fixture
def judge() -> Judge:
    torch.manual_seed(4)
    return Judge(JudgeArch(32, mid_dim=16, num_heads=4, ffn_dim=32)).eval()


@pytest.fixture
def probe() -> Probe:
    torch.manual_seed(5)
    return Probe(ProbeArch(32)).eval()


def probe_of(probe: Probe) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The scores of a probe that reads one block."""
    return lambda hidden, lengths: probe([hidden], lengths)


def spoiled(hidden: torch.Tensor) -> torch.Tensor:
    """The same documents with NaN where they are padded."""
    out = hidden.clone()
    for row, length in enumerate(LENGTHS.tolist()):
        out[row, length:] = torch.nan
    return out


@torch.no_grad()
def test_means_and_scores_do_not_depend_on_padding_or_company(
    hidden: torch.Tensor, probe: Probe, judge: Judge
) -> None:
    for head in (pooled, probe_of(probe), judge):
        together = head(spoiled(hidden), LENGTHS)
        for row, length in enumerate(LENGTHS.tolist()):
            own = hidden[row : row + 1, :length]
            alone = own.mean(1) if head is pooled else head(own, LENGTHS[row : row + 1])
            torch.testing.assert_close(together[row], alone[0], atol=1e-5, rtol=0)


@torch.no_grad()
def test_training_and_grading_run_the_same_first_pass(hidden: torch.Tensor, judge: Judge) -> None:
    scores = judge(hidden, LENGTHS)
    first, second = judge.forward_with_teacher(hidden, LENGTHS, torch.full((3, 5), 0.25))
    torch.testing.assert_close(first, scores, atol=1e-5, rtol=0)
    other, told = judge.forward_with_teacher(hidden, LENGTHS, torch.ones(3, 5))
    torch.testing.assert_close(first, other)
    assert not torch.allclose(second, told), "only the second pass sees the oracle's scores"
    # Reading at the query alone gives what the whole encoder layer gives there.
    states = torch.nn.functional.layer_norm(hidden, (32,))
    tokens = judge.proj(torch.cat([judge.q0.expand(3, 1, -1), states], dim=1))
    whole = judge.enc0(tokens, src_key_padding_mask=torch.arange(8) > LENGTHS[:, None])
    torch.testing.assert_close(scores, judge.shared_head(whole[:, 0]), atol=1e-5, rtol=0)
    scaled = judge(100 * hidden, LENGTHS)
    torch.testing.assert_close(scores, scaled, atol=1e-3, rtol=1e-3, msg="of any scale")


def test_values_that_are_not_finite_are_counted_in_documents_and_not_in_padding(
    hidden: torch.Tensor,
) -> None:
    assert count_nonfinite(spoiled(hidden), LENGTHS).tolist() == [0, 0, 0]
    hidden[1, 2, 0] = torch.inf
    hidden[1, 1, 3] = torch.nan
    assert count_nonfinite(hidden, LENGTHS).tolist() == [0, 2, 0]


def test_a_few_failed_documents_are_borne_and_more_are_an_error_that_names_one() -> None:
    failed = {f"d{i}": "states are not finite" for i in range(10)}
    require_few_failed(failed, 500)
    require_few_failed({f"d{i}": "" for i in range(50)}, 5000)
    require_few_failed({"d0": ""}, 2)  # but for one document
    for num_documents, more in ((500, {"x": "why"}), (10, {})):
        with refused("E-HEAD-NONFINITE", "d0: "):
            require_few_failed(failed | more, num_documents)


@torch.no_grad()
def test_only_heads_of_the_first_published_form_put_numbers_for_what_is_none(
    hidden: torch.Tensor,
) -> None:
    old = Judge(JudgeArch(32, 16, 4, 32, nan_to_num=True)).eval()
    new = Judge(JudgeArch(32, 16, 4, 32)).eval()
    new.load_state_dict(old.state_dict())
    by_hand = hidden.clone()
    hidden[0, 2, 5], hidden[1, 0, 1], hidden[2, 0, 7] = torch.nan, torch.inf, -torch.inf
    by_hand[0, 2, 5], by_hand[1, 0, 1], by_hand[2, 0, 7] = 0.0, 1e4, -1e4
    assert torch.equal(old(hidden, LENGTHS), new(by_hand, LENGTHS))
    assert not torch.isfinite(new(hidden, LENGTHS)).all()


def test_batches_hold_every_document_once_and_ones_of_like_length_together() -> None:
    tokens = [np.array(d, np.uint32) for d in random_documents(8, 13)]
    documents = DocumentTokens([str(i) for i in range(13)], tokens)
    found = list(batches(documents, 4, torch.device("cpu")))
    longest = [batch.input_ids.shape[1] for batch in found]
    assert longest == sorted(longest)
    assert sorted(row for batch in found for row in batch.rows) == list(range(13))


@torch.no_grad()
def test_a_saved_head_loads_with_its_header_and_equal_heads_have_equal_bytes(
    tmp_path: Path, probe: Probe, judge: Judge, backbone: Transformer, hidden: torch.Tensor
) -> None:
    path = write_head(tmp_path, judge, backbone, metrics={"n": 3})
    again = write_head(tmp_path / "b", judge, backbone, metrics={"n": 3})
    assert path.read_bytes() == again.read_bytes()
    loaded, header, *_ = load_head(path, backbone, MAX_CTX)
    assert (header["format"], header["arch"]["mid_dim"]) == ("hydra-head/2", 16)
    assert not {"scale", "num_scores"} & {*header, *header["arch"]}, "as in files of five scores"
    with safe_open(str(path), "pt") as file:
        assert list(file.metadata()) == ["nmoe"]
        assert json.loads(file.metadata()["nmoe"]) == header == read_header(path)
    assert torch.equal(loaded(hidden, LENGTHS), judge(hidden, LENGTHS))
    for width in range(0, 256, 8):  # a file starts with the length of its header
        load_head(write_head(tmp_path, probe, backbone, note="x" * width), backbone, MAX_CTX)


def test_heads_that_do_not_belong_are_refused_with_a_code_each(
    tmp_path: Path, probe: Probe, judge: Judge, backbone: Transformer
) -> None:
    path = tmp_path / PROBE_NAME

    def is_refused(code: str, match: str | None = None, max_ctx: int = MAX_CTX) -> None:
        with refused(code, match):
            load_head(path, backbone, max_ctx)

    is_refused("E-HEAD-MISSING")
    for name in ("hydra_probe", "hydra_probe_phase_a", "hydra_probe_phase_c"):
        torch.save(probe.state_dict(), tmp_path / f"{name}.pt")
        is_refused("E-HEAD-PICKLE", rf"{name}\.pt")  # the one that its own tool reads first
    for payload in (path.with_suffix(".pt").read_bytes(), pickle.dumps(probe.state_dict())):
        path.write_bytes(payload)
        is_refused("E-HEAD-PICKLE", r"probe\.safetensors")
    path.write_bytes(b"nonsense" * 10)
    is_refused("E-HEAD-FORMAT")
    write_head(tmp_path, probe, backbone)
    is_refused("E-HEAD-CONTEXT", max_ctx=MAX_CTX + 1)
    write_head(tmp_path, probe, backbone, backbone={"digest": "other"})
    is_refused("E-HEAD-BACKBONE")
    write_head(tmp_path, probe, backbone, arch={"kind": "probe", "hidden_size": 64})
    is_refused("E-HEAD-FORMAT")  # tensors of another shape than the header's
    write_head(tmp_path, probe, backbone, tap=4)
    judge_path = write_head(tmp_path, judge, backbone, tap=4)
    heads = load_heads(tmp_path, backbone, MAX_CTX)
    assert (heads.probe_taps, heads.judge_tap) == ((4,), 4)
    write_head(tmp_path, probe, backbone, tap=1)
    assert load_heads(tmp_path, backbone, MAX_CTX).probe_taps == (1,)
    write_head(tmp_path, probe, backbone, tap=[4, 1])
    with refused("E-HEAD-FORMAT", "ascending"):
        load_heads(tmp_path, backbone, MAX_CTX)
    write_head(tmp_path, probe, backbone, tap=[1, 4])
    with refused("E-HEAD-FORMAT", "32 dimensions for 2 blocks"):
        load_heads(tmp_path, backbone, MAX_CTX)
    for tap in (0, backbone.config.num_hidden_layers + 1, True, [1, 0]):
        write_head(tmp_path, probe, backbone, tap=tap)
        with refused("E-HEAD-FORMAT", "no such block"):
            load_heads(tmp_path, backbone, MAX_CTX)
    shutil.copy(judge_path, path)
    with refused("E-HEAD-FORMAT", "Judge and Judge"):
        load_heads(tmp_path, backbone, MAX_CTX)
    torch.nn.init.constant_(probe.proj.bias, torch.nan)
    write_head(tmp_path, probe, backbone)
    is_refused("E-HEAD-NONFINITE")


@torch.no_grad()
def test_weights_of_the_first_published_form_come_in_unchanged(
    tmp_path: Path, judge: Judge, probe: Probe, backbone: Transformer, hidden: torch.Tensor
) -> None:
    for head in (probe, judge):
        torch.save(head.state_dict(), path := tmp_path / "head.pt")
        import_pickle(path, tmp_path, backbone, MAX_CTX, num_heads=4)
    heads = load_heads(tmp_path, backbone, MAX_CTX)
    assert torch.equal(heads.judge(hidden, LENGTHS), judge(hidden, LENGTHS))
    assert torch.equal(heads.probe([hidden], LENGTHS), probe([hidden], LENGTHS))
    header = read_header(tmp_path / JUDGE_NAME)
    assert (header["scorer_model"], header["arch"]["nan_to_num"]) == ("unknown", True)
    assert (heads.probe_taps, heads.judge_tap) == ((6,), 8)
    for num_heads in (0, -1, 3):  # it must divide the judge's width
        with refused("E-HEAD-FORMAT"):
            import_pickle(path, tmp_path, backbone, MAX_CTX, num_heads)


def second_form(judge: Judge) -> dict[str, torch.Tensor]:
    """The same judge under the names of the second published form, its second pass left out."""
    names = {"q0": "q_token", "proj": "projector", "enc0": "encoder", "shared_head": "rubric_head"}
    tensors = {}
    for name, tensor in judge.state_dict().items():
        part, _, rest = name.partition(".")
        if part in names:
            tensors[f"{names[part]}.{rest}".rstrip(".")] = tensor
    return tensors


def as_export(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """A table of each part, the query token among those of the encoder."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        part, rest = (part, rest) if rest else ("encoder", name)
        parts.setdefault(part, {})[rest] = tensor
    return parts


@pytest.mark.parametrize("form", [as_export, dict])
@torch.no_grad()
def test_a_judge_of_the_second_published_form_grades_as_it_did(
    tmp_path: Path, judge: Judge, backbone: Transformer, hidden: torch.Tensor, form: Any
) -> None:
    path, tensors = tmp_path / "any_name.pt", second_form(judge)
    torch.save(form(tensors), path)
    made = import_pickle(path, tmp_path / "heads", backbone, MAX_CTX, num_heads=4)
    head, header, *_ = load_head(made, backbone, MAX_CTX)
    assert made.name == JUDGE_NAME
    assert header["arch"]["has_second_pass"] is False
    torch.testing.assert_close(head(hidden, LENGTHS), judge(hidden, LENGTHS))
    del tensors["q_token"]
    torch.save(form(tensors), path)
    with refused("E-HEAD-FORMAT"):
        import_pickle(path, tmp_path / "heads", backbone, MAX_CTX, num_heads=4)


@torch.no_grad()
def test_the_gate_of_a_second_probe_is_the_mean_of_five_equal_scores(
    tmp_path: Path, backbone: Transformer, hidden: torch.Tensor
) -> None:
    gate = torch.nn.Linear(32, 1)
    tensors = {f"gate.{name}": value for name, value in gate.state_dict().items()}
    tensors["domain.weight"], tensors["domain.bias"] = torch.zeros(9, 32), torch.zeros(9)
    torch.save(tensors, tmp_path / "hydra_probe_phase_c.pt")
    made = import_pickle(tmp_path / "hydra_probe_phase_c.pt", tmp_path, backbone, MAX_CTX)
    scores = load_head(made, backbone, MAX_CTX).head([hidden], LENGTHS)
    torch.testing.assert_close(scores.mean(1) / 4, gate(pooled(hidden, LENGTHS))[:, 0])
    # Equal but for the order in which a matrix product adds up its columns.
    torch.testing.assert_close(scores, scores[:, :1].expand(-1, 5), rtol=1e-6, atol=1e-6)
