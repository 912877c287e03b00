"""Experts by triton_kernels, against plain torch over a double of the library; what is refused."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nmoe_core.base.settings import expert_fingerprints
from nmoe_core.engine import BatchedGenerator, GeneratorOptions, ModelConfig, Transformer
from nmoe_core.engine.backend import with_experts
from nmoe_core.engine.block import PLAIN
from nmoe_core.engine.experts import PLAIN_EXPERTS, Chosen
from nmoe_core.engine.hub import HUB, REPOSITORY, VERSION, library
from nmoe_core.engine.weights.checkpoint import open_checkpoint
from nmoe_core.engine.weights.families import QWEN3_MOE
from nmoe_core.engine.weights.layout import HUGGING_FACE
from nmoe_core.engine.weights.weight_files import WeightFiles
from tests.core.engine.builders import SMALL, random_tensors
from tests.core.engine.hub_double import LIBRARY
from tests.golden.engine.recipe import write_checkpoint
from tests.refusals import refused

CONFIG = replace(SMALL, hidden_size=64, intermediate_size=96, quant_method="mxfp4")
AS_USUAL: Any = SimpleNamespace(min_rows=1, batch_invariant=False)
GPU = torch.device("cuda")


@pytest.fixture(scope="module")
def packed_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = random_tensors(CONFIG, 3, HUGGING_FACE, is_packed=True)
    return write_checkpoint(tmp_path_factory.mktemp("hub") / "made", CONFIG.to_hf(), tensors)


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The package that loads the library is not there; `setitem` puts one there."""
    monkeypatch.setitem(sys.modules, "kernels", None)
    library.cache_clear()
    yield monkeypatch
    library.cache_clear()


@pytest.fixture
def asked(modules: pytest.MonkeyPatch) -> list[object]:
    """What was asked of the hub, whose `kernels` gives the double."""
    calls: list[object] = []
    hub = SimpleNamespace(get_kernel=lambda *a, **options: calls.append((*a, options)) or LIBRARY)
    modules.setitem(sys.modules, "kernels", hub)
    return calls


@pytest.fixture
def gpu(modules: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A Hopper GPU, as far as torch is asked."""
    modules.setattr(torch.cuda, "is_available", lambda: True)
    modules.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return modules


def choices(num_rows: int, k: int, num_experts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_rows, num_experts, generator=generator).topk(k).indices


def product(packed_dir: Path, x: Tensor, chosen: Chosen, dtype: torch.dtype) -> list[Tensor]:
    """The residual of ones plus the sum: in plain torch, and by the library."""
    with open_checkpoint(packed_dir) as checkpoint:
        layer = checkpoint.layer(0, dtype, "packed")
    residual = torch.ones_like(x)
    return [
        way.product(way.prepare(CONFIG, layer), x, chosen, residual, AS_USUAL)
        for way in (PLAIN_EXPERTS, HUB)
    ]


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "experts",
    [
        choices(1, 4, 6, seed=0),
        choices(23, 4, 6, seed=1),
        choices(23, 2, 6, seed=2),
        choices(9, 1, 6, seed=3),
        choices(40, 2, 4, seed=4),  # the last two experts have no rows
        1 + choices(7, 2, 5, seed=5),  # nor has the first
        torch.tensor([[5, 0]]).repeat(8, 1),
    ],
    ids=["one row", "four", "two", "one", "last without rows", "first without", "all the same"],
)
def test_rows_are_those_of_plain_torch(packed_dir, experts: Tensor, index, dtype):
    generator = torch.Generator().manual_seed(len(experts))
    x = torch.randn(len(experts), 64, generator=generator).to(dtype)
    weights = torch.rand(experts.shape, generator=generator).softmax(-1)
    expected, found = product(packed_dir, x, Chosen(weights, experts.to(index)), dtype)
    assert found.dtype == dtype
    distances = (found - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    assert distances.max() <= (1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.usefixtures("asked")
def test_equal_weights_and_equal_rows_keep_their_experts(packed_dir):
    x = torch.ones(6, 64)
    chosen = Chosen(torch.full((6, 2), 0.5), choices(6, 2, 6, seed=6))
    expected, found = product(packed_dir, x, chosen, torch.float32)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    assert len(found.unique(dim=0)) > 1


@pytest.mark.usefixtures("asked")
def test_no_rows_give_no_rows(packed_dir):
    chosen = Chosen(torch.zeros(0, 2), torch.zeros(0, 2).long())
    for found in product(packed_dir, torch.zeros(0, 64), chosen, torch.float32):
        assert found.shape == (0, 64)


@pytest.fixture
def model(packed_dir: Path, asked) -> Transformer:
    """A model whose experts the double multiplies."""
    runtime = replace(PLAIN, experts=HUB)
    with open_checkpoint(packed_dir) as checkpoint:
        form = checkpoint.expert_form("hub")
        assert form == "packed"
        layers = [checkpoint.layer(i, torch.float32, form) for i in range(3)]
        blocks = [PLAIN.block(CONFIG, i, layer, HUB) for i, layer in enumerate(layers)]
        return Transformer(CONFIG, runtime, blocks, checkpoint.tables(torch.float32), "0" * 64)


def test_a_model_gives_the_plain_path_s_logits(packed_dir, model):
    plain = Transformer.from_checkpoint(packed_dir)
    ids, lengths = torch.arange(40).view(2, 20), torch.tensor([20, 7])
    expected = plain(ids, lengths)
    torch.testing.assert_close(model(ids, lengths), expected, rtol=1e-3, atol=1e-3)
    assert expert_fingerprints(model.runtime.experts.name) == {"experts": "hub"}
    found = [
        BatchedGenerator(each, 64, 2).generate_batch([[1, 2, 3], [4]], 4, temperature=0.0)
        for each in (plain, model)
    ]
    assert found[0] == found[1]


def test_a_promise_of_batch_invariance_is_refused(model):
    generator = BatchedGenerator(model, 64, 2, options=GeneratorOptions(batch_invariant=True))
    generator.add([5, 6, 7], 4)
    with refused("E-CONFIG-EXPERTS", "do not set batch_invariant"):
        generator.step()


def chosen_way(config: ModelConfig = CONFIG, dtype=torch.bfloat16, is_packed=True, device=GPU):
    return with_experts(PLAIN, "hub", config, device, dtype, is_packed).experts


@pytest.mark.usefixtures("gpu")
def test_the_pinned_version_is_asked_of_the_hub_once(asked):
    assert chosen_way() is HUB
    assert chosen_way() is HUB
    assert asked == [(REPOSITORY, {"version": VERSION})]


@pytest.mark.usefixtures("asked", "gpu")
@pytest.mark.parametrize(
    "options",
    [
        {"config": replace(CONFIG, family=QWEN3_MOE)},
        {"dtype": torch.float32},
        {"is_packed": False},
        {"device": torch.device("cpu")},
    ],
)
def test_another_model_or_device_is_refused(options):
    with refused("E-CONFIG-EXPERTS", "does not support this model on this device"):
        chosen_way(**options)


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("capability", [7, 10])
def test_another_gpu_is_refused(gpu: pytest.MonkeyPatch, capability: int):
    gpu.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))
    with refused("E-CONFIG-EXPERTS", naming=[f"({capability}.x)"]):
        chosen_way()


@pytest.mark.usefixtures("asked")
def test_a_model_is_refused_before_its_weights_are_read(packed_dir, monkeypatch):
    monkeypatch.setattr(WeightFiles, "read", lambda *_: pytest.fail("weights were read"))
    with refused("E-CONFIG-EXPERTS", "does not support this model on this device"):
        Transformer.from_checkpoint(packed_dir, moe_backend="hub", dtype=torch.bfloat16)


@pytest.mark.usefixtures("gpu")
def test_without_the_library_the_error_says_what_to_install():
    with refused("E-CONFIG-EXTRA", "pip install kernels"):
        chosen_way()


@pytest.mark.usefixtures("gpu")
def test_a_hub_that_cannot_be_reached_is_one_error(modules):
    def get_kernel(*_: object, **__: object) -> None:
        raise ConnectionError("no route to the hub")

    modules.setitem(sys.modules, "kernels", SimpleNamespace(get_kernel=get_kernel))
    with refused("E-CONFIG-EXTRA", "no route to the hub"):
        chosen_way()
