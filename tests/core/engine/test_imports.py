"""What the engine imports, and that its page and its benchmark run as they are written."""

import ast
import os
import re
import sys
from pathlib import Path

import pytest

from tests.project import output_of

ROOT = Path(__file__).parents[3]

# What torch itself declares or may load stays allowed; torch imports some of it late.
SCRIPT = """
import importlib.metadata, importlib.util, pkgutil, re, sys, tempfile
import torch, numpy, safetensors.torch

declared = importlib.metadata.requires("torch") or []
allowed = {re.match(r"[A-Za-z0-9_.-]+", line)[0].lower().replace("-", "_") for line in declared}
allowed |= {"torch", "torchgen", "functorch", "numpy", "safetensors", "triton"}
allowed |= {"mpmath", "markupsafe", "nmoe_core", "loader", "_distutils_hack"}
for name in importlib.metadata.packages_distributions():
    if name not in allowed and not name.startswith("_"):
        sys.modules[name] = None  # importing it is an error

import nmoe_core.engine as engine
modules = {module.name for module in pkgutil.walk_packages(engine.__path__, "nmoe_core.engine.")}
assert {"nmoe_core.engine.generation.generator", "nmoe_core.engine.kernels.block"} <= modules
has_triton = importlib.util.find_spec("triton") is not None
for module in sorted(modules):
    if has_triton or ".kernels." not in module:
        importlib.import_module(module)
with tempfile.TemporaryDirectory() as directory:
    path = engine.make_tiny_checkpoint(directory + "/c", vocab_size=300, num_layers=2)
    model = engine.Transformer.from_checkpoint(path)
    logits, hidden = model(torch.arange(20)[None], return_hidden_states=(1,))
    assert logits.shape == (1, 20, 300)
names = ("pydantic", "orjson", "tiktoken", "transformers", "dagster")
print([sys.modules[name] for name in names])
"""


def test_the_engine_needs_torch_numpy_and_safetensors_alone():
    assert output_of(sys.executable, "-c", SCRIPT) == "[None, None, None, None, None]\n"


def test_tests_and_figures_on_a_gpu_need_torch_triton_numpy_and_pytest_alone():
    allowed = {"torch", "triton", "numpy", "safetensors", "pytest"}
    ours = ("nmoe_core.engine", "nmoe_core.base.errors")  # errors need no package
    ours += ("benchmarks.gpu", "tests.golden.engine", "tests.gpu")
    folders = ("tests/gpu", "tests/golden/engine", "benchmarks/gpu")
    files = [path for folder in folders for path in (ROOT / folder).glob("*.py")]
    assert len(files) >= 8
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                root = name.partition(".")[0]
                is_known = root in allowed | sys.stdlib_module_names or name.startswith(ours)
                assert is_known, f"{path.name} imports {name}"


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/engine.md", "exec"), names)
    assert getattr(names["logits"], "shape", None) == (2, 40, 300)
    assert str(names["device"]) == "cpu"


@pytest.mark.slow
def test_the_benchmark_prints_a_line_for_each_case():
    command = (sys.executable, "-m", "benchmarks.engine", "--rounds", "1", "--lengths", "64")
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    lines = output_of(*command, cwd=ROOT, env=env).splitlines()
    assert lines[0].startswith("float32, 1 thread")
    assert len(lines) == 2 + 1 + 2 + 2 + 1
    assert all(float(line.split()[-3]) > 0 for line in lines[2:])
