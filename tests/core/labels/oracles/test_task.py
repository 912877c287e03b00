from pathlib import Path

import pytest

from nmoe_core.base.errors import ConfigError
from nmoe_core.config.run import Run
from nmoe_core.config.tree import Tree
from nmoe_core.labels.oracle import read_records
from nmoe_core.labels.oracles import engine
from nmoe_core.labels.slices import write_source_slices
from nmoe_core.tasks.hydra import label_slices
from tests.core.labels.oracles.server import MODEL, JudgeServer
from tests.refusals import refused


@pytest.fixture
def project(tmp_path: Path, prepared_data: Path) -> Path:
    """A run with a small source, prepared and sliced."""
    write_source_slices(Tree.below(tmp_path, data=prepared_data), "web")
    return tmp_path


def run_of(project: Path, oracle: str) -> Run:
    path = project / "run.toml"
    path.write_text(f'root = "{project}"\n[oracle]\n{oracle}\n')
    return Run(path)


def test_a_run_labels_over_http_with_two_settings(project: Path, server: JudgeServer) -> None:
    settings = f'kind = "http"\nrelabel = 2\n[oracle.http]\nbase_url = "{server.url}"\n'
    run = run_of(project, settings + f'model = "{MODEL}"')
    outputs = label_slices(run, ["web"], ["train-00", "val-01"])
    assert outputs["train-00"].facts["parse_rate"] == 1.0
    assert outputs["train-00"].facts["scorer"].startswith(f"{MODEL}/")
    assert outputs["val-01"].facts["relabelled"] <= 2
    again = read_records(project / "labels/val/shard_1/relabelled/scores.jsonl")
    assert {record["rubric_hash"] for record in again} == {run.rubric.turned().hash}
    asked = server.asked.total()
    again = label_slices(run, ["web"], ["train-00", "val-01"])
    assert server.asked.total() == asked
    assert [again[key].digest for key in again] == [outputs[key].digest for key in outputs]


def test_a_run_labels_with_a_checkpoint_and_refuses_to_mix_scorers(
    project: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "FINAL_TOKENS", 8)
    settings = f'kind = "engine"\n[oracle.engine]\ncheckpoint = "{checkpoint}"\n'
    run = run_of(project, settings + "max_ctx = 764\nmax_new = 16\n")
    facts = label_slices(run, ["web"], ["val-00"])["val-00"].facts
    assert facts["oracle_calls"] == facts["documents"]
    assert facts["parse_rate"] == 0.0
    with refused("E-LABEL-MIXED"):
        label_slices(run_of(project, 'kind = "heuristic"'), ["web"], ["val-00"])


HTTP = 'kind = "http"\n[oracle.http]\nmodel = "m"\nbase_url = "{}"'

EXTRA = HTTP.format("http://h") + "\nextra_body = {{ {} }}"


@pytest.mark.parametrize(
    ("oracle", "named"),
    [
        ('kind = "engine"', "checkpoint"),
        ('kind = "http"', "base_url"),
        ('kind = "oracle"', "kind"),
        (HTTP.format("ftp://h"), "base_url"),
        (HTTP.format("http://me:key@h/v1"), "base_url"),
        (HTTP.format("http://h") + '\nkey = "k"', "key"),
        (EXTRA.format("max_tokens = 9"), "extra_body: 'max_tokens'"),
        (EXTRA.format("messages = []"), "extra_body: 'messages'"),
        (EXTRA.format("until = 2026-01-01"), "extra_body: a value cannot be sent as JSON"),
        (EXTRA.format("top_p = nan"), "extra_body"),
        ("[oracle.engine]\nmax_contxt = 5", "max_ctx"),
        ("retry_failed = -1", "retry_failed"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, oracle: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        run_of(tmp_path, oracle)
