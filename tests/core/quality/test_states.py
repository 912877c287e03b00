"""Pooled states and perplexity of documents: as in transformers, made once, in parts."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nmoe_core.attributes.attribute import open_shard_documents
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.engine import Transformer, make_tiny_checkpoint
from nmoe_core.tasks.shards import attribute_sources
from nmoe_core.text.normalise import normalize_text
from nmoe_core.text.tokenizer import load_tokenizer
from tests.core.quality.grading.small_run import source_of
from tests.project import Project, json_lines, write_project
from tests.refusals import refused_line

pq = pytest.importorskip("pyarrow.parquet")
NUM_DOCUMENTS = 30
TINY = {
    "prep": {"num_shards": 2, "max_tokens": "all", "min_doc_tokens": 1},
    "backbone": {"kind": "tiny", "family": "llama"},
    "attributes": {
        "embedding": {"layers": [2, "final"], "max_tokens": 24},
        "perplexity": {"max_tokens": 24},
    },
}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A prepared run whose backbone has random weights."""
    made = write_project(tmp_path, [source_of(NUM_DOCUMENTS)], TINY)
    assert main(["prep-mixture", "--config", str(made.config)]) == 0
    return made


def rows_of(run: Run, name: str) -> dict[bytes, dict[str, Any]]:
    """Rows of an attribute by the hash of the text."""
    paths = [shard.attribute(name) for shard in run.tree.shards("web", 2)]
    return {row["text_sha256"]: row for path in paths for row in pq.read_table(path).to_pylist()}


def documents_of(run: Run) -> dict[bytes, np.ndarray]:
    """Token ids of each document, without EOS, by the hash of its text."""
    found = {}
    for shard in run.tree.shards("web", 2):
        opened = open_shard_documents(shard)
        tokens = [one[:-1] for file in opened.files for _, one, _ in file.documents()]
        found |= dict(zip(map(bytes.fromhex, opened.documents.text_sha256), tokens))
    return found


def test_states_and_perplexity_of_a_run_are_those_of_transformers(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    argv = ["--config", str(project.config)]
    assert main(["embed", *argv]) == main(["perplexity", *argv]) == 0
    run = project.run
    model = transformers.AutoModelForCausalLM.from_pretrained(
        run.tree.checkpoint, dtype=torch.float32
    )
    tokenizer = load_tokenizer(run.tokenizer)
    states = rows_of(run, "embedding")
    bits = rows_of(run, "perplexity")
    documents = documents_of(run)
    assert len(documents) == NUM_DOCUMENTS
    assert max(map(len, documents.values())) > 24
    for digest, tokens in documents.items():
        ids = torch.tensor([tokens[:24].tolist()])
        with torch.inference_mode():
            theirs = model(ids, labels=ids, output_hidden_states=True)
        for name, number in (("layer_2_mean", 2), ("final_mean", -1)):
            wanted = theirs.hidden_states[number][0].mean(dim=0).numpy()
            assert np.allclose(states[digest][name], wanted, rtol=1e-4, atol=1e-5)
        loss = float(theirs.loss)
        count = ids.shape[1] - 1
        assert bits[digest]["n_predicted_tokens"] == count
        assert bits[digest]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
        size = len(tokenizer.decode(tokens[1:24]).encode())
        wanted_bits = loss * count / math.log(2) / size
        assert bits[digest]["bits_per_byte"] == pytest.approx(wanted_bits, rel=1e-4)
    rule = "bits_per_byte < 1000 and n_predicted_tokens >= 1"
    more = ["--set", "attributes.use=perplexity", "--where", rule]
    assert main(["select", *argv, *more]) == 0


def test_a_killed_run_goes_on_after_its_last_part_and_writes_the_same_bytes(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.attributes.attribute.PART_TOKENS", 100)
    run = project.run.with_settings({"attributes.use": ["perplexity"], "prep.num_shards": 2})
    attribute_sources(run, ["perplexity"])
    path = run.tree.shard("web", 0).attribute("perplexity")
    whole = path.read_bytes()
    path.unlink()
    log_probs = Transformer.log_probs
    calls: list[int] = []

    def stopped(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return log_probs(*given)

    monkeypatch.setattr(Transformer, "log_probs", stopped)
    with pytest.raises(KeyboardInterrupt):
        attribute_sources(run, ["perplexity"])
    assert not path.exists()
    attribute_sources(run, ["perplexity"])
    resumed = len(calls) - 3
    assert path.read_bytes() == whole
    path.unlink()
    attribute_sources(run, ["perplexity"])
    assert len(calls) - 3 - resumed == resumed + 2, "two parts were kept"
    assert path.read_bytes() == whole
    assert sorted(one.name for one in path.parent.iterdir()) == ["perplexity.parquet"]


def test_a_file_of_texts_gets_the_rows_that_a_run_gives_the_same_texts(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["embed", "--config", str(project.config)]) == 0
    run = project.run
    texts = tmp_path / "in" / "web.jsonl"
    out = tmp_path / "out.parquet"
    argv = ["embed", "--input-jsonl", str(texts), "--out", str(out)]
    argv += [
        "--checkpoint",
        str(run.tree.checkpoint),
        '--set=attributes.embedding.layers=[2, "final"]',
    ]
    argv += ["--set=attributes.embedding.max_tokens=24", "--set", f"tokenizer={run.tokenizer.name}"]
    assert main(argv) == 0
    found = pq.read_table(out).to_pylist()
    lines = [json.loads(line) for line in texts.read_text().splitlines()]
    assert [row["doc_id"] for row in found] == [line["id"] for line in lines]
    of_run = rows_of(run, "embedding")
    for row, line in zip(found, lines):
        digest = hashlib.sha256(normalize_text(line["text"]).encode()).digest()
        assert row["text_sha256"] == digest
        assert row["layer_2_mean"] == of_run[digest]["layer_2_mean"]
        assert row["final_mean"] == of_run[digest]["final_mean"]
    before = out.stat().st_mtime_ns
    assert main(argv) == 0
    assert out.stat().st_mtime_ns == before, "nothing changed"
    texts.write_text(json_lines(lines[:3]))
    assert main([*argv, "--set=attributes.embedding.pooling=last"]) == 0
    names = pq.read_table(out).column_names
    assert names == ["doc_id", "text_sha256", "layer_2_last", "final_last"]


def test_a_row_does_not_depend_on_the_documents_beside_it(tmp_path: Path) -> None:
    model = Transformer.from_checkpoint(make_tiny_checkpoint(tmp_path, vocab_size=300))
    ids = torch.randint(0, 300, (3, 40), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([40, 1, 23])
    found = model.log_probs(ids, lengths)
    assert found[1].eq(0).all()
    assert torch.equal(found[2, :23], model.log_probs(ids[2:, :23])[0])
    wanted = model(ids).log_softmax(dim=2)[0, :-1].gather(1, ids[0, 1:, None]).squeeze(1)
    assert torch.allclose(found[0, 1:], wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--set=attributes.embedding.layers=[5]"],
            "found 5, expected different blocks of 1 to 4, or final",
        ),
        (["--set=attributes.embedding.layers=[2, 2]"], "found 2, 2"),
        (["--out", "x.parquet"], "--out has no effect without --input-jsonl"),
        (["--input-jsonl", "a", "--source", "web"], "--source has no effect with --input-jsonl"),
        (["--input-jsonl", "none.jsonl"], "--out is missing"),
    ],
)
def test_what_has_no_meaning_is_refused(
    project: Project, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    argv = ["embed", "--config", str(project.config), *flags]
    assert said in refused_line(capsys, *argv, code="E-CONFIG")
