"""`nmoe explain` on a project whose pipeline has run: every fact is found again in the files."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from loader import open_loader
from loader.files.checksummed_json import sealed
from nmoe_core.audit.lineage import explain_document, explain_step
from nmoe_core.base.errors import CurationError, FormatError
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.shards.documents import DocumentReader
from tests.project import json_lines, read_rows, said
from tests.refusals import refused_line

STEP = 1


@pytest.fixture(scope="module")
def run(project: Path) -> Run:
    return Run(project / "run.toml")


def by_id(*paths: Path) -> dict[str, dict]:
    return {row["doc_id"]: row for row in read_rows(*paths)}


def documents_of(facts: dict) -> list[tuple[int, dict]]:
    return [(i, doc) for i, row in enumerate(facts["rows"]) for doc in row["documents"]]


def test_the_documents_of_a_step_are_the_tokens_that_the_loader_gives(run: Run) -> None:
    loader = open_loader(run.tree.plan, backend="numpy")
    plan = loader.plan
    loader.seek_step(STEP)
    inputs, _ = loader.next()
    facts = explain_step(run, STEP)
    assert [row["sequence"] for row in facts["rows"]] == [4, 5, 6, 7]
    covered = np.zeros(inputs.shape, bool)
    reader = DocumentReader(run.tree.data)
    for i, document in documents_of(facts):
        where = slice(document["row_start"], document["row_start"] + document["tokens"])
        covered[i, where] = True
        whole = np.asarray(reader.tokens(document["doc_id"])).tobytes()
        part = inputs[i, where].astype("<u4").tobytes()
        assert (whole == part) if document["is_whole"] else (part in whole)
    assert covered.all()
    assert facts["plan_hash"] == plan.plan_hash


def test_decisions_scores_and_labels_of_a_step_match_the_tasks(run: Run) -> None:
    grades = by_id(*run.tree.quality.rglob("quality_scores.jsonl"))
    labels = by_id(*(run.tree.labels / "merged").glob("labels_*.jsonl"))
    documents = [doc for step in range(8) for _, doc in documents_of(explain_step(run, step))]
    for document in documents:
        grade = grades[document["doc_id"]]
        for key in ("decision", "aggregated", "q_probe", "scores"):
            assert document[key] == grade[key]
        assert document["label"] == labels.get(document["doc_id"], {}).get("aggregated")
    assert documents
    assert all(document["label"] is not None for document in documents), "all splits have labels"


def test_a_document_names_the_steps_that_name_it(run: Run) -> None:
    for i, document in documents_of(explain_step(run, STEP)):
        facts = explain_document(run, document["doc_id"], max_readings=10_000)
        here = [r for r in facts["readings"] if (r["step"], r["row"]) == (STEP, i)]
        assert [r["row_start"] for r in here] == [document["row_start"]]
        assert [r["tokens"] for r in here] == [document["tokens"]]
        assert facts["ingest_id"] == document["ingest_id"]
        assert facts["curated"]["is_included"]
    assert explain_document(run, document["ingest_id"])["doc_id"] == document["doc_id"]


def test_a_document_that_is_not_kept_is_never_read_and_one_of_validation_not_graded(
    run: Run,
) -> None:
    grades = by_id(*run.tree.quality.rglob("quality_scores.jsonl"))
    dropped = next(doc_id for doc_id, row in grades.items() if row["decision"] != "keep")
    facts = explain_document(run, dropped)
    assert facts["grade"] == grades[dropped]
    assert facts["curated"] == {"is_included": False}
    assert facts["readings"] == []
    path = next((run.tree.data / "docs" / "valid").rglob("*.ids.jsonl"))
    ingest_id = json.loads(path.read_text("utf-8").splitlines()[0])["id"]
    facts = explain_document(run, ingest_id)
    assert (facts["split"], "grade" in facts) == ("valid", False)


def test_stages_that_have_not_run_are_not_yet_known(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, document = documents_of(explain_step(run, STEP))[0]
    for name in ("run.toml", "mixture.toml", "flows.toml", "workspace.yaml"):
        shutil.copy(run.base / name, tmp_path / name)
    shutil.copytree(run.tree.data, tmp_path / "out" / "data")
    early = Run(tmp_path / "run.toml")
    facts = explain_document(early, document["doc_id"])
    for key in ("label", "grade", "thresholds", "curated", "readings"):
        assert facts[key] is None
    assert main(["explain", document["doc_id"], "--config", str(early.path)]) == 0
    assert capsys.readouterr().out.count("not yet") >= 3
    command = ("explain", "--step", "0", "--config", str(early.path))
    refused_line(capsys, *command, code="E-PLAN-FORMAT")


def test_scores_of_another_version_and_an_id_of_two_documents_are_refused(
    run: Run, own_project: Path
) -> None:
    _, document = documents_of(explain_step(run, STEP))[0]
    copy = Run(own_project / "run.toml")
    for path in copy.tree.quality.rglob("summary.json"):
        value = json.loads(path.read_text())
        value["fingerprints"]["shard"] = "0" * 64
        path.write_text(json.dumps(sealed(value)))
    with pytest.raises(CurationError, match="another version of this shard"):
        explain_document(copy, document["doc_id"])
    ids = next(copy.tree.data.glob("docs/train/shard_0000/*.ids.jsonl"))
    rows = read_rows(ids)
    rows[1]["id"] = rows[0]["id"]
    ids.write_text(json_lines(rows))
    with pytest.raises(FormatError, match="several documents"):
        explain_document(copy, rows[0]["id"])


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["no such thing"], "E-DOCID"),
        (["code//code/train/shard_0000/code-v1-shard-000000.npy#s=1:e=2"], "E-DOCID"),
        (["--step", "1000000"], "E-SEEK"),
        (["--step", "-1"], "E-SEEK"),
        (["--step", "0", "--row", "4"], "E-SEEK"),
    ],
)
def test_unknown_steps_rows_and_documents_are_refused_in_one_line(
    run: Run, capsys: pytest.CaptureFixture[str], arguments: list[str], code: str
) -> None:
    refused_line(capsys, "explain", *arguments, "--config", str(run.path), code=code)


def test_the_command_prints_a_row_of_a_step_and_one_document(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ["--config", str(run.path)]
    facts = said(capsys, "explain", "--step", STEP, "--row", "2", *config)
    assert [row["sequence"] for row in facts["rows"]] == [6]
    document = facts["rows"][0]["documents"][0]
    assert main(["explain", "--step", str(STEP), *config]) == 0
    assert document["ingest_id"] in capsys.readouterr().out
    assert main(["explain", document["doc_id"], *config]) == 0
    lines = capsys.readouterr().out
    assert document["decision"] in lines
    assert f"step {STEP}, row 2: {document['tokens']:,} tokens" in lines
