from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from nmoe_core.base.errors import HeadError
from nmoe_core.engine import Transformer
from nmoe_core.heads.convert import import_pickle
from nmoe_core.heads.features import (
    DocumentTokens,
    batches,
    count_nonfinite,
    pooled,
    require_few_failed,
    tap_states,
)
from nmoe_core.heads.files import load_head, load_heads, read_header, save_head
from nmoe_core.heads.models import Judge, JudgeArch, Probe, ProbeArch
from tests.core.quality import random_documents

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


def spoiled(hidden: torch.Tensor) -> torch.Tensor:
    """The same documents with NaN where they are padded."""
    out = hidden.clone()
    for row, length in enumerate(LENGTHS.tolist()):
        out[row, length:] = torch.nan
    return out


def test_the_mean_of_a_document_is_over_its_own_states(hidden: torch.Tensor) -> None:
    means = pooled(spoiled(hidden), LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        torch.testing.assert_close(means[row], hidden[row, :length].mean(0))


@pytest.mark.parametrize("name", ["probe", "judge"])
@torch.no_grad()
def test_scores_do_not_depend_on_padding_or_company(
    hidden: torch.Tensor, name: str, request: pytest.FixtureRequest
) -> None:
    head = request.getfixturevalue(name)
    together = head(spoiled(hidden), LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        alone = head(hidden[row : row + 1, :length], LENGTHS[row : row + 1])
        torch.testing.assert_close(together[row], alone[0], atol=1e-5, rtol=0)


@torch.no_grad()
def test_training_and_grading_run_the_same_first_pass(hidden: torch.Tensor, judge: Judge) -> None:
    first, second = judge.forward_with_teacher(hidden, LENGTHS, torch.ones(3, 5))
    torch.testing.assert_close(first, judge(hidden, LENGTHS), atol=1e-5, rtol=0)
    other, told = judge.forward_with_teacher(hidden, LENGTHS, torch.full((3, 5), 4.0))
    torch.testing.assert_close(first, other)
    assert not torch.allclose(second, told), "only the second pass sees the oracle's scores"


@torch.no_grad()
def test_reading_at_the_query_alone_gives_what_the_whole_encoder_layer_gives(
    hidden: torch.Tensor, judge: Judge
) -> None:
    states = torch.nn.functional.layer_norm(hidden, (32,))
    tokens = judge.proj(torch.cat([judge.q0.expand(3, 1, -1), states], dim=1))
    is_padding = torch.arange(8) > LENGTHS[:, None]
    whole = judge.enc0(tokens, src_key_padding_mask=is_padding)
    expected = judge.shared_head(whole[:, 0])
    torch.testing.assert_close(judge(hidden, LENGTHS), expected, atol=1e-5, rtol=0)


def test_the_scale_of_states_does_not_matter(hidden: torch.Tensor, judge: Judge) -> None:
    with torch.no_grad():
        torch.testing.assert_close(
            judge(hidden, LENGTHS), judge(100 * hidden, LENGTHS), atol=1e-3, rtol=1e-3
        )


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
    for num_documents, more in ((500, {"x": "why"}), (10, {})):
        with pytest.raises(HeadError, match="d0: ") as refused:
            require_few_failed(failed | more, num_documents)
        assert refused.value.code == "E-HEAD-NONFINITE"


def test_only_heads_of_the_first_published_form_put_numbers_for_what_is_none(
    hidden: torch.Tensor,
) -> None:
    hidden[0, 2, 5], hidden[1, 0, 1], hidden[2, 0, 7] = torch.nan, torch.inf, -torch.inf
    old = Judge(JudgeArch(32, 16, 4, 32, nan_to_num=True)).eval()
    new = Judge(JudgeArch(32, 16, 4, 32)).eval()
    new.load_state_dict(old.state_dict())
    by_hand = hidden.clone()
    by_hand[0, 2, 5], by_hand[1, 0, 1], by_hand[2, 0, 7] = 0.0, 1e4, -1e4
    with torch.no_grad():
        assert torch.equal(old(hidden, LENGTHS), new(by_hand, LENGTHS))
        assert not torch.isfinite(new(hidden, LENGTHS)).all()


def test_batches_hold_documents_of_like_length_and_their_states_do_not_depend_on_it(
    backbone: Transformer,
) -> None:
    tokens = [np.array(d, np.uint32) for d in random_documents(8, 13)]
    names = [str(i) for i in range(13)]
    seen: dict[int, torch.Tensor] = {}
    longest = []
    for batch in batches(DocumentTokens(names, tokens), 4, torch.device("cpu")):
        assert batch.names == [names[i] for i in batch.rows]
        longest.append(batch.input_ids.shape[1])
        states = pooled(tap_states(backbone, batch, 6)[0], batch.lengths)
        seen |= dict(zip(batch.rows, states))
    assert sorted(seen) == list(range(13))
    assert longest == sorted(longest)
    for i, document in enumerate(tokens):
        (alone,) = batches(DocumentTokens([""], [document]), 1, torch.device("cpu"))
        states = pooled(tap_states(backbone, alone, 6)[0], alone.lengths)
        torch.testing.assert_close(states[0], seen[i], atol=1e-5, rtol=1e-5)


def header_of(backbone: Transformer, **more: Any) -> dict[str, Any]:
    return {"backbone": {"digest": backbone.digest}, "max_ctx": 24, "scorer_model": "fake"} | more


def test_a_saved_head_loads_with_its_header_and_equal_heads_have_equal_bytes(
    tmp_path: Path, judge: Judge, backbone: Transformer, hidden: torch.Tensor
) -> None:
    path = tmp_path / "hydra_judge.safetensors"
    digest = save_head(path, judge, header_of(backbone, metrics={"n": 3}))
    assert save_head(tmp_path / "b.safetensors", judge, header_of(backbone, metrics={"n": 3})) == (
        digest
    )
    loaded, header = load_head(path, backbone, 24)
    assert header["format"] == "hydra-head/2"
    assert header["arch"]["mid_dim"] == 16
    with safe_open(str(path), "pt") as file:
        assert list(file.metadata()) == ["nmoe"]
        assert json.loads(file.metadata()["nmoe"]) == header
    with torch.no_grad():
        assert torch.equal(loaded(hidden, LENGTHS), judge(hidden, LENGTHS))


def test_heads_that_do_not_belong_are_refused_with_a_code_each(
    tmp_path: Path, probe: Probe, judge: Judge, backbone: Transformer
) -> None:
    def code_of(path: Path, max_ctx: int = 24) -> str:
        with pytest.raises(HeadError) as refused:
            load_head(path, backbone, max_ctx)
        return refused.value.code

    path = tmp_path / "hydra_probe.safetensors"
    assert code_of(path) == "E-HEAD-MISSING"
    torch.save(probe.state_dict(), path.with_suffix(".pt"))
    assert code_of(path) == "E-HEAD-PICKLE", "the missing file's pickle is named"
    path.write_bytes(path.with_suffix(".pt").read_bytes())
    assert code_of(path) == "E-HEAD-PICKLE", "a pickle under a safe name"
    path.write_bytes(pickle.dumps(probe.state_dict()))
    assert code_of(path) == "E-HEAD-PICKLE"
    path.write_bytes(b"nonsense" * 10)
    assert code_of(path) == "E-HEAD-FORMAT"
    save_head(path, probe, header_of(backbone))
    assert code_of(path, max_ctx=25) == "E-HEAD-CONTEXT"
    save_head(path, probe, header_of(backbone) | {"backbone": {"digest": "other"}})
    assert code_of(path) == "E-HEAD-BACKBONE"
    wrong = {"arch": {"kind": "probe", "hidden_size": 64}}
    save_head(path, probe, header_of(backbone) | wrong)
    assert code_of(path) == "E-HEAD-FORMAT", "tensors of another shape than the header's"
    save_head(path, judge, header_of(backbone))
    save_head(tmp_path / "hydra_judge.safetensors", judge, header_of(backbone))
    with pytest.raises(HeadError) as swapped:
        load_heads(tmp_path, backbone, 24)
    assert swapped.value.code == "E-HEAD-FORMAT"
    with torch.no_grad():
        probe.proj.bias[2] = torch.nan
    save_head(path, probe, header_of(backbone))
    assert code_of(path) == "E-HEAD-NONFINITE"


def test_weights_of_the_first_published_form_come_in_unchanged(
    tmp_path: Path, judge: Judge, probe: Probe, backbone: Transformer, hidden: torch.Tensor
) -> None:
    torch.save(judge.state_dict(), tmp_path / "hydra_judge.pt")
    torch.save(probe.state_dict(), tmp_path / "hydra_probe.pt")
    import_pickle(tmp_path / "hydra_judge.pt", tmp_path / "heads", backbone, 24, num_heads=4)
    import_pickle(tmp_path / "hydra_probe.pt", tmp_path / "heads", backbone, 24)
    heads = load_heads(tmp_path / "heads", backbone, 24)
    with torch.no_grad():
        assert torch.equal(heads.judge(hidden, LENGTHS), judge(hidden, LENGTHS))
        assert torch.equal(heads.probe(hidden, LENGTHS), probe(hidden, LENGTHS))
    header = read_header(tmp_path / "heads" / "hydra_judge.safetensors")
    assert (header["scorer_model"], header["arch"]["nan_to_num"]) == ("unknown", True)
    assert (heads.probe_tap, heads.judge_tap) == (6, 8)


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
def test_a_judge_of_the_second_published_form_grades_as_it_did(
    tmp_path: Path, judge: Judge, backbone: Transformer, hidden: torch.Tensor, form: Any
) -> None:
    torch.save(form(second_form(judge)), tmp_path / "any_name.pt")
    made = import_pickle(tmp_path / "any_name.pt", tmp_path / "heads", backbone, 24, num_heads=4)
    head, header = load_head(made, backbone, 24)
    assert made.name == "hydra_judge.safetensors"
    assert header["arch"]["has_second_pass"] is False
    with torch.no_grad():
        # By the names of that form, step by step: query and normalised states, one layer, one map.
        states = torch.nn.functional.layer_norm(hidden[:1], (32,))
        tokens = judge.proj(torch.cat([judge.q0.expand(1, 1, -1), states], dim=1))
        expected = judge.shared_head(judge.enc0(tokens)[:, 0])
        torch.testing.assert_close(head(hidden[:1], LENGTHS[:1]), expected)


def test_the_gate_of_a_second_probe_is_the_mean_of_five_equal_scores(
    tmp_path: Path, backbone: Transformer, hidden: torch.Tensor
) -> None:
    gate = torch.nn.Linear(32, 1)
    tensors = {f"gate.{name}": value for name, value in gate.state_dict().items()}
    tensors["domain.weight"], tensors["domain.bias"] = torch.zeros(9, 32), torch.zeros(9)
    torch.save(tensors, tmp_path / "hydra_probe_phase_c.pt")
    made = import_pickle(tmp_path / "hydra_probe_phase_c.pt", tmp_path, backbone, 24)
    head, _ = load_head(made, backbone, 24)
    with torch.no_grad():
        scores = head(hidden, LENGTHS)
        torch.testing.assert_close(scores.mean(1) / 4, gate(pooled(hidden, LENGTHS))[:, 0])
    # Equal but for the order in which a matrix product adds up its columns.
    torch.testing.assert_close(scores, scores[:, :1].expand(-1, 5), rtol=1e-6, atol=1e-6)


def test_of_pickles_without_a_head_file_the_one_its_own_tool_reads_first_is_named(
    tmp_path: Path, backbone: Transformer
) -> None:
    for name in ("hydra_probe.pt", "hydra_probe_phase_a.pt", "hydra_probe_phase_c.pt"):
        torch.save({}, tmp_path / name)
    with pytest.raises(HeadError, match=r"hydra_probe_phase_c\.pt") as refused:
        load_head(tmp_path / "hydra_probe.safetensors", backbone, 24)
    assert refused.value.code == "E-HEAD-PICKLE"


def test_a_probe_that_reads_a_later_block_than_the_judge_is_refused(
    tmp_path: Path, judge: Judge, probe: Probe, backbone: Transformer
) -> None:
    save_head(tmp_path / "hydra_probe.safetensors", probe, header_of(backbone, tap=4))
    save_head(tmp_path / "hydra_judge.safetensors", judge, header_of(backbone, tap=3))
    with pytest.raises(HeadError, match="the probe reads block 4, the judge 3"):
        load_heads(tmp_path, backbone, 24)
    save_head(tmp_path / "hydra_judge.safetensors", judge, header_of(backbone, tap=4))
    heads = load_heads(tmp_path, backbone, 24)
    assert (heads.probe_tap, heads.judge_tap) == (4, 4)


def test_a_pickle_that_holds_code_or_other_tensors_is_not_imported(
    tmp_path: Path, backbone: Transformer, judge: Judge
) -> None:
    class Code:
        def __reduce__(self):
            return (print, ("code ran",))

    torch.save({"proj.weight": Code()}, tmp_path / "code.pt")
    torch.save({"proj.weight": torch.zeros(5, 64)}, tmp_path / "part.pt")
    torch.save(Probe(ProbeArch(64)).state_dict(), tmp_path / "wide.pt")
    queryless = {k: v for k, v in second_form(judge).items() if k != "q_token"}
    torch.save(as_export(queryless), tmp_path / "queryless.pt")
    torch.save({"gate.weight": torch.zeros(2, 32), "gate.bias": torch.zeros(2)}, tmp_path / "2.pt")
    torch.save({"gate.weight": torch.zeros(1, 32)}, tmp_path / "unbiased.pt")
    torch.save({"epoch": 3, "state": {}}, tmp_path / "training.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    paths = sorted(path.name for path in tmp_path.glob("*.pt"))
    assert len(paths) == 8
    for name in paths:
        with pytest.raises(HeadError) as refused:
            import_pickle(tmp_path / name, tmp_path / "heads", backbone, 24)
        assert refused.value.code == "E-HEAD-FORMAT"
    assert not (tmp_path / "heads").exists()


def test_slices_labels_and_thresholds_do_not_need_torch() -> None:
    labels = "slices label files agreement oracles.heuristic"
    modules = [f"labels.{m}" for m in labels.split()]
    modules += ["config.rubric", "calibration.thresholds", "calibration.graded"]
    code = (
        "import sys, importlib\n"
        f"for m in {modules}: importlib.import_module('nmoe_core.' + m)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
