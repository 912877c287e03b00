"""The examples of functions of one's own run as they are written."""

import json
import math
import re
import shutil
import sys
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.cli import main
from tests.project import REPOSITORY, Project, jsonl_source, said, toml, write_project

pytest.importorskip("pyarrow.parquet")
pytest.importorskip("duckdb")

EXAMPLES = REPOSITORY / "examples" / "own_code"
MEDICAL = "The patient takes 20 mg of the drug, and 5 mg more at night, said the doctor."
LEGAL = "The court heard the appeal, and the judge dismissed the claim of the plaintiff."
ROWS = [
    {"id": f"{kind}{i}", "text": f"{text} {i}"}
    for i in range(6)
    for kind, text in (("m", MEDICAL), ("l", LEGAL))
]


def _table(example: str) -> dict[str, Any]:
    """The table at the top of an example."""
    text = (EXAMPLES / f"{example}.py").read_text("utf-8").split('"""')[1]
    found = re.search(r"^\[attributes\.\w+\]\n(?:\w.*\n)+", text, re.MULTILINE)
    assert found is not None
    ((_, table),) = tomllib.loads(found[0].replace("\\\\", "\\"))["attributes"].items()
    return table


def _made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], example: str, **keys: Any
) -> list[dict[str, Any]]:
    """The columns of an example for the documents above, as `nmoe sql` reads them."""
    shutil.copytree(EXAMPLES, tmp_path / "examples" / "own_code")
    table = _table(example) | keys
    project = write_project(
        tmp_path,
        [jsonl_source("web", ROWS)],
        {"attributes": {"own": table}, "prep": {"num_shards": 1}},
    )
    config = str(project.config)
    assert main(["prep-mixture", "--config", config]) == 0
    assert main(["attributes", "--config", config]) == 0
    names = ", ".join(f"own.{name}" for name in table["columns"])
    return said(
        capsys, "sql", "--config", config, f"select ingest_id, {names} from documents order by 1"
    )


def test_a_list_of_regular_expressions_counts_and_removes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patterns = {"dosage": r"\d+ mg", "court": r"\b[Cc]ourt\b"}
    (tmp_path / "patterns.toml").write_text(toml(patterns), encoding="utf-8")
    rows = _made(tmp_path, capsys, "regex_list")
    found = {(row["ingest_id"][0], row["dosage"], row["court"]) for row in rows}
    assert found == {("m", 2, 0), ("l", 0, 1)}
    transform = {"kind": "function", "function": "regex_list:remove", "path": "examples/own_code"}
    settings = {"transforms": [transform | {"model": "patterns.toml"}]}
    project = write_project(tmp_path, [jsonl_source("web", ROWS)], settings)
    assert main(["prep-mixture", "--config", str(project.config), "--force"]) == 0
    told = said(capsys, "explain", "--config", project.config, "m3")
    assert told["text"] == MEDICAL.replace("20 mg", "").replace("5 mg", "") + " 3"
    assert {change["rule"] for change in told["changes"]["changes"]} == {"dosage"}


def test_a_fasttext_classifier_labels_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fasttext = pytest.importorskip("fasttext", reason="pip install fasttext-numpy2-wheel")
    lines = [f"__label__{r['id'][0]} {r['text'].lower()}\n" for r in ROWS]
    (tmp_path / "lines.txt").write_text("".join(lines * 20), encoding="utf-8")
    model = None
    while model is None:
        # Each of ten threads sets a tenth of the weights before training; the rest is garbage. Even
        # so, training in this wheel meets NaN in some attempts.
        with suppress(RuntimeError):
            lines_file = str(tmp_path / "lines.txt")
            model = fasttext.train_supervised(lines_file, dim=16, thread=10, verbose=0)
    (tmp_path / "models").mkdir()
    model.save_model(str(tmp_path / "models" / "topics.bin"))
    rows = _made(tmp_path, capsys, "fasttext_classifier")
    for row, given in zip(rows, sorted(ROWS, key=lambda row: row["id"]), strict=True):
        (label,), (probability,) = model.predict(given["text"])
        assert row["label"] == label.removeprefix("__label__")
        assert row["probability"] == probability
    assert {row["label"] for row in rows} == {"l", "m"}


def test_a_classifier_of_transformers_labels_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    torch = pytest.importorskip("torch")
    from tests.own_tokenizers import byte_level

    directory = tmp_path / "models" / "classifier"
    directory.mkdir(parents=True)
    byte_level(directory, [MEDICAL, LEGAL])
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    torch.manual_seed(0)
    config = transformers.DistilBertConfig(
        vocab_size=1000, dim=16, n_heads=2, n_layers=2, hidden_dim=32, max_position_embeddings=64
    )
    config.id2label = {0: "a", 1: "b"}
    model = transformers.DistilBertForSequenceClassification(config).eval()
    model.save_pretrained(directory)
    rows = _made(tmp_path, capsys, "transformers_classifier", settings={"max_tokens": 60})
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    for row, given in zip(rows, sorted(ROWS, key=lambda row: row["id"]), strict=True):
        tokens = tokenizer(given["text"], truncation=True, max_length=60, return_tensors="pt")
        with torch.inference_mode():
            expected = model(**tokens).logits[0].double().softmax(0)
        assert row["label"] == "ab"[int(expected.argmax())]
        assert math.isclose(row["probability"], float(expected.max()), rel_tol=1e-6)


def test_the_engine_measures_perplexity_in_a_function_as_the_attribute_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from nmoe_core.engine.weights.tiny import make_tiny_checkpoint

    make_tiny_checkpoint(tmp_path / "models" / "smollm2", num_layers=2)
    rows = _made(tmp_path, capsys, "engine_perplexity")
    assert all(row["bits_per_byte"] > 0 for row in rows)
    project = Project(tmp_path)
    given = ["--config", str(project.config), "--set", "backbone.kind=checkpoint"]
    given += ["--set", "backbone.checkpoint=models/smollm2"]
    assert main(["perplexity", *given]) == 0
    given += ["--set", "attributes.use=perplexity"]
    query = "select perplexity.bits_per_byte p, own.bits_per_byte o from documents"
    for row in said(capsys, "sql", *given, query):
        assert math.isclose(row["p"], row["o"], rel_tol=1e-5)


@pytest.mark.parametrize("example", ["fasttext_classifier", "transformers_classifier"])
def test_packages_of_examples_are_those_that_they_name(example: str) -> None:
    code = (EXAMPLES / f"{example}.py").read_text("utf-8")
    named = {name.split("-")[0] for name in _table(example)["packages"]}
    imported = set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))
    assert named == imported - sys.stdlib_module_names
