"""Whole models on a GPU: goldens of transformers, generation with graphs, one pass sanitized."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nmoe_core.engine import (
    BatchedGenerator,
    GeneratorOptions,
    Request,
    Sampling,
    Transformer,
    make_tiny_checkpoint,
)
from nmoe_core.engine.block import PLAIN
from nmoe_core.engine.kernels.block import KERNELS
from tests.golden.engine import recipe

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The plain path's bounds (tests/core/engine/test_goldens.py), five times: another order of sums.
LOGITS_ATOL, HIDDEN_RTOL = 1e-3, 5e-5
# Medians that transformers' own bfloat16 has, the largest over the prompts.
BFLOAT16_LOGITS = {"tiny4": 0.0242, "deep24": 0.0229}


@pytest.fixture(scope="module")
def golden_path(tmp_path_factory):
    root = tmp_path_factory.mktemp("golden")
    return lambda name: recipe.checkpoint(name, root)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    sizes = {"vocab_size": 300, "num_layers": 4, "sliding_window": 16}
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint", **sizes)


def test_every_way_to_a_model_on_the_gpu_gives_kernels(tiny):
    for model in (
        Transformer.from_checkpoint(tiny, device=DEVICE, moe_backend="packed"),
        BatchedGenerator(tiny, 64, 2, device=DEVICE).model,
    ):
        assert model.runtime is KERNELS
        assert model.use_graphs
    assert Transformer.from_checkpoint(tiny).runtime is PLAIN


@pytest.mark.parametrize("experts", ["decoded", "packed"])
@pytest.mark.parametrize("name", ["tiny4", "deep24"])
def test_goldens_equal_transformers(golden_path, name, experts):
    model = Transformer.from_checkpoint(golden_path(name), device=DEVICE, moe_backend=experts)
    prompts = list(recipe.prompts(name))
    for prompt in prompts:
        logits, hidden = model(recipe.ids(prompt), return_hidden_states=recipe.taps(prompt))
        logits = logits[0].cpu()
        assert logits.argmax(-1).tolist() == prompt["argmax"].tolist()
        assert np.abs(logits.numpy() - prompt["logits"]).max() <= LOGITS_ATOL
        for tap, states in hidden.items():
            assert recipe.relative(states[0], prompt[f"hidden_{tap}"]) <= HIDDEN_RTOL
    count = min(len(prompt["greedy"]) for prompt in prompts)
    generator = BatchedGenerator(model, 1024, 4)
    got = generator.generate_batch([prompt["ids"].tolist() for prompt in prompts], count)
    assert got == [prompt["greedy"][:count].tolist() for prompt in prompts]


@pytest.mark.parametrize("name", BFLOAT16_LOGITS)
def test_bfloat16_logits_are_as_near_as_those_of_transformers(golden_path, name):
    model = Transformer.from_checkpoint(golden_path(name), device=DEVICE, dtype=torch.bfloat16)
    for prompt in recipe.prompts(name):
        error = recipe.relative(model(recipe.ids(prompt))[0], prompt["logits"], axis=-1)
        assert np.median(error) <= 2 * BFLOAT16_LOGITS[name]


@pytest.mark.parametrize("use_graphs", [False, True])
def test_generation_is_that_of_the_cpu(tiny, use_graphs):
    """Stop ids, sampling, pages that run out, batches that shrink through the recorded sizes."""
    numbers = torch.Generator().manual_seed(0)
    requests = [
        Request(
            torch.randint(0, 300, (5 + 7 * i,), generator=numbers).tolist(),
            20 - i,
            Sampling(0.8 * (i % 2), 0.9 if i % 3 else 1.0, 40, seed=i),
            frozenset(range(i, 300, 29)),
        )
        for i in range(8)
    ]
    done = []
    for device in ("cpu", DEVICE):
        model = Transformer.from_checkpoint(tiny, device=device)
        model.use_graphs = use_graphs and device == DEVICE
        options = GeneratorOptions(num_pages=16, max_step_tokens=40)
        generator = BatchedGenerator(model, 96, 6, options=options)
        assert generator.launches_ahead == (device == "cuda")
        done.append(sorted(generator.complete(requests), key=lambda completion: completion.index))
    assert done[0] == done[1]
    assert {completion.finish_reason for completion in done[0]} == {"stop", "length"}


SANITIZED = """
import sys
from nmoe_core.engine import BatchedGenerator, GeneratorOptions, Transformer
model = Transformer.from_checkpoint(sys.argv[1], device=sys.argv[2], moe_backend="packed")
generator = BatchedGenerator(model, 64, 3, options=GeneratorOptions(max_step_tokens=16))
print(generator.generate_batch([[1, 2, 3], [4] * 21], 4))
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_one_run_is_clean_under_compute_sanitizer(tiny, tool):
    """A prompt in pieces beside decoding, then recorded steps: every kernel is launched."""
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
    command += [sys.executable, "-c", SANITIZED, str(tiny), DEVICE]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if "Device not supported" in run.stdout + run.stderr:
        pytest.skip("compute-sanitizer does not support this device")
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
