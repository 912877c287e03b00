"""Whole runs with tokenizers of one's own, in uint32 and in uint16, over one text; the backbone of
the last is a Llama that has another tokenizer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader import load_manifest, load_plan, open_loader
from loader.__main__ import main as loader_main
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.engine import make_tiny_checkpoint
from nmoe_core.quality.heads.scores import DocumentTokens
from nmoe_core.shards.documents import shard_files
from nmoe_core.shards.export.run import export
from nmoe_core.tasks.curate import make_plan
from nmoe_core.tasks.hydra import load_scorer
from nmoe_core.text.tokenizer import load_tokenizer
from tests.own_tokenizers import SIZE, byte_level, pieces
from tests.project import json_lines, jsonl_source, read_rows, said, write_project

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
WORDS = ("use the default value", "because each example", "naïve 東京 returns a long explanation")
TEXTS = [f"number {i} " + f"{WORDS[i % 3]} {i % 7} " * (1 + i % 5) for i in range(400)]
STEPS = ("prep-mixture", "hydra slices", "hydra oracle-label", "train probe", "train judge")
STEPS += ("hydra calibrate", "hydra grade", "curate shards")
SETTINGS: dict[str, Any] = {
    "prep": {"num_shards": 2, "max_tokens": "all", "min_doc_tokens": 1},
    "backbone": {"kind": "tiny"},
    "heads": {"max_ctx": 16, "judge": {"mid_dim": 16, "num_heads": 4, "ffn_dim": 32}},
    "curation": {"num_topics": 3},
    "seq_len": 32,
    "batch_size": 2,
    "on_exhaust": "wrap",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A finished run of each tokenizer, which lies in the project as `own`."""
    source = jsonl_source("web", [{"id": f"d{i}", "text": text} for i, text in enumerate(TEXTS)])
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nmoe_core.text.equivalence.SWEPT", (range(0x1F600, 0x1F640),))
        for name, dtype, write in (
            ("wide", "uint32", byte_level),
            ("small", "uint16", byte_level),
            ("pieces", "auto", pieces),
        ):
            settings = {**SETTINGS, "tokenizer": "own"}
            settings["prep"] = {**SETTINGS["prep"], "dtype": dtype}
            if name == "pieces":
                settings["backbone"] = {"checkpoint": "llama"}
            project = write_project(tmp_path_factory.mktemp(name), [source], settings)
            if name == "pieces":
                llama = project.directory / "llama"
                make_tiny_checkpoint(llama, family="llama", vocab_size=SIZE, num_layers=4)
                byte_level(llama, TEXTS)
            (project.directory / "own").mkdir()
            write(project.directory / "own", TEXTS)
            for words in STEPS:
                assert main([*words.split(), "--config", str(project.config)]) == 0
            make_plan(project.run, ["web"], [])
            made[name] = project.run
    return made


def documents(run: Run, tree: str) -> list[tuple[str, str]]:
    """The ingest id and the text of each document, in order."""
    root = run.tree.root / tree
    tokenizer = load_tokenizer(run.tokenizer)
    manifest = load_manifest(root / "web" / "train" / "manifest.json")
    return [
        (ids[0], tokenizer.decode(tokens[:-1]))
        for file in shard_files(root, manifest)
        for _, tokens, ids in file.documents()
    ]


def stream(plan: object, cache: Path | None = None) -> np.ndarray:
    loader = open_loader(plan, backend="numpy", cache_dir=cache)
    return np.concatenate([inputs for inputs, _ in loader])


def test_two_tokenizers_prepare_the_same_documents_in_one_order(runs: dict[str, Run]) -> None:
    found = {name: documents(run, "data") for name, run in runs.items()}
    assert found["wide"] == found["small"] == found["pieces"]
    assert dict(found["wide"]) == {f"d{i}": text.strip() for i, text in enumerate(TEXTS)}
    kept = documents(runs["pieces"], "curated")
    assert 0 < len(kept) < len(TEXTS)
    assert set(kept) <= set(found["pieces"])
    assert load_manifest(runs["pieces"].tree.curated_manifest("web")).dtype == "uint16"


def test_grades_and_curated_shards_do_not_depend_on_the_integers(runs: dict[str, Run]) -> None:
    kept = {name: documents(runs[name], "curated") for name in ("wide", "small")}
    assert kept["wide"] == kept["small"]
    scores = [
        [run.tree.shard("web", bucket).scores.read_bytes() for bucket in range(2)]
        for run in (runs["wide"], runs["small"])
    ]
    assert scores[0] == scores[1]


def test_curated_uint16_shards_are_read_explained_and_exported_as_uint32(
    runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: dict[str, list[str]] = {}
    streams, exports = [], []
    for name, dtype in (("wide", "uint32"), ("small", "uint16")):
        run = runs[name]
        manifest = load_manifest(run.tree.curated_manifest("web"))
        assert manifest.dtype == dtype
        assert main(["verify", str(manifest.path), "--deep"]) == 0
        capsys.readouterr()
        for command in (["--step", "1"], ["d7"]):
            assert main(["explain", *command, "--config", str(run.path)]) == 0
        assert loader_main(["peek", str(run.tree.plan)]) == 0
        plan = load_plan(run.tree.plan)
        printed = capsys.readouterr().out.replace(plan.plan_hash, "...")
        said[name] = printed.replace(plan.plan_hash[:12], "...").splitlines()
        streams += [stream(run.tree.plan), stream(f"file://{run.tree.plan}", tmp_path / name)]
        export(manifest.path, tmp_path / "out" / name, "olmo")
        paths = sorted((tmp_path / "out" / name).glob("*.npy"))
        exports.append(
            np.concatenate([np.fromfile(path, f"<u{np.dtype(dtype).itemsize}") for path in paths])
        )
    assert said["wide"] == said["small"]
    for other in streams[1:]:
        np.testing.assert_array_equal(streams[0], other)
    np.testing.assert_array_equal(*exports)


def test_a_llama_grades_the_text_as_its_own_tokenizer_reads_it(
    runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs["pieces"]
    llama, scorer = load_tokenizer(str(run.tree.checkpoint)), load_scorer(run)
    grades = read_rows(*sorted((run.tree.root / "quality").rglob("*.jsonl")))
    names = [grade["doc_id"] for grade in grades]
    rows = [llama.encode_batch([text]).ids[:16] for _, text in documents(run, "data")]
    assert len(rows) == len(names) == len(TEXTS)
    expected = scorer.score(DocumentTokens(names, rows)).probe
    found = [list(grade["probe_scores"].values()) for grade in grades]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json_lines([{"id": "a", "text": TEXTS[0]}]))
    command = ["generate", prompts, "-o", tmp_path / "out.jsonl", "--max-tokens", "3"]
    assert said(capsys, *command, "--checkpoint", run.tree.checkpoint)["completions"] == 1
    [completion] = read_rows(tmp_path / "out.jsonl")
    assert completion["num_prompt_tokens"] == len(llama.encode_batch([TEXTS[0]]).ids)
    assert completion["text"] == llama.decode(completion["tokens"])


def test_random_weights_given_as_a_checkpoint_are_called_a_stand_in(
    runs: dict[str, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    for run in runs.values():
        assert said(capsys, "report", "--config", run.path)["backbone"] == "tiny"
