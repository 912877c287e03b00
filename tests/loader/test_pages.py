"""The loader's pages are true: each block of the guide and of the pages below it runs."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from loader import DeterministicLoader, resolve_plan
from loader.__main__ import main as loader_main
from nmoe_core.cli import main as nmoe_main
from tests.loader.conftest import Tree
from tests.project import REPOSITORY

PAGES = [REPOSITORY / "docs" / "loader.md", *sorted((REPOSITORY / "docs" / "loader").glob("*.md"))]
RUN = 'batch_size = 4\nseq_len = 16\nsteps = 40\n[data]\ndata_path = "data/web"\n'
STORE = "s3://bucket"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_block_of_a_page_runs(page: Path, tree, tmp_path, monkeypatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("datasets")
    for name in ("web", "code", "books"):
        tree.add(name, 20_000)
        tree.add(name, 500, split="valid", num_files=2)
        Tree(tmp_path / "other").add(name, 20_000, tokenizer="other")  # the same documents
    tree.add("wiki", 20_000, tokenizer="o200k_harmony", vocab_size=201_088, eos_token_id=199_999)
    Path(tmp_path, "text", "code").mkdir(parents=True)
    Path(tmp_path, "text", "code", "a.jsonl").write_text('{"text": "x = 1, and so on"}\n' * 900)
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
    plan = resolve_plan(
        {"datasets": tree.rows("web", "books"), "batch_size": 4, "seq_len": 16, "steps": 40}
    )
    Path("plan.json").write_text(plan.placed_in(tmp_path).to_json())
    names: dict[str, Any] = {}
    text = page.read_text("utf-8").replace(STORE, f"file://{tmp_path}/store")
    os.mkdir("store")
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if language == "python":
            exec(compile(block, page.name, "exec"), names)
        elif language == "toml":
            Path("run.toml").write_text(block)
            resolve_plan("run.toml")
        else:
            for line in block.splitlines():
                program, *arguments = shlex.split(line)
                main = nmoe_main if program == "nmoe" else loader_main
                assert main(arguments if program == "nmoe" else arguments[2:]) == 0, line


def test_the_trainer_of_the_readme_trains_on_every_step_and_resumes(
    tree, tmp_path, monkeypatch
) -> None:
    pytest.importorskip("torch")
    tree.add("web", 20_000)
    monkeypatch.chdir(tmp_path)
    settings = {"datasets": tree.rows("web"), "batch_size": 4, "seq_len": 16, "steps": 40}
    plan = resolve_plan(settings)
    path = Path("build/demo/mixture/loader_plan.json")
    path.parent.mkdir(parents=True)
    path.write_text(plan.placed_in(path.parent.absolute()).to_json())
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)

    def steps_from(checkpoint: dict[str, Any] | None) -> list[bytes]:
        read = []

        def train_step(_model: None, inputs: Any, targets: Any) -> None:
            assert inputs.shape == targets.shape == (4, 16)
            read.append(inputs.numpy().tobytes())

        names = {"checkpoint": checkpoint, "train_step": train_step, "model": None}
        exec(compile(block, "README.md", "exec"), names)
        return read

    whole = steps_from(None)
    assert len(whole) == 40
    with DeterministicLoader(plan) as loader:
        loader.seek_step(15)
        state = loader.state_dict()
    assert steps_from({"loader": state}) == whole[15:]
