import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nmoe_core.base.errors import ConfigError
from nmoe_core.config.run import Run
from nmoe_core.config.tree import Tree
from nmoe_core.labels.jobs import labelling_of
from nmoe_core.labels.oracle import read_records
from nmoe_core.labels.oracles import engine
from nmoe_core.labels.slices import read_slice, write_source_slices
from nmoe_core.tasks.hydra import label_slices
from tests.core.labels.oracles.server import GOOD, MODEL, JudgeServer, Reply, completion, tokens_of
from tests.core.labels.oracles.whole_runs import model_of
from tests.core.small_gradings import FakeTokenizer, write_source
from tests.project import contents, said
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
    drawn = list(read_records(project / "labels/val/shard_1/resampled/scores.jsonl"))
    assert {record["scorer_version"].rpartition("/")[2] for record in drawn} == {"sampled"}
    temperatures = [request["temperature"] for request in server.requests]
    assert temperatures.count(1.0) == len(drawn) == outputs["val-01"].facts["relabelled"]
    asked = server.asked.total()
    again = label_slices(run, ["web"], ["train-00", "val-01"])
    assert server.asked.total() == asked
    assert [again[key].digest for key in again] == [outputs[key].digest for key in outputs]


def test_a_run_labels_with_a_checkpoint_and_keeps_its_answers(
    project: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "FINAL_TOKENS", 8)
    settings = f'kind = "engine"\n[oracle.engine]\ncheckpoint = "{checkpoint}"\n'
    run = run_of(project, settings + "max_ctx = 764\nmax_new = 16\n")
    facts = label_slices(run, ["web"], ["val-00"])["val-00"].facts
    assert facts["oracle_calls"] == facts["documents"]
    assert facts["parse_rate"] == 0.0
    files = contents(project / "labels" / "val")
    label_slices(run_of(project, 'kind = "heuristic"'), ["web"], ["val-00"])
    again = label_slices(run, ["web"], ["val-00"])["val-00"].facts
    assert again["oracle_calls"] == 0
    assert contents(project / "labels" / "val") == files


HTTP = 'kind = "http"\n[oracle.http]\nmodel = "m"\nbase_url = "{}"'


def test_no_change_of_settings_pays_twice(project: Path, server: JudgeServer) -> None:
    """Not the way to another oracle and back, not the parser, not the limit of answers."""

    def label(oracle: str) -> int:
        """The number of requests."""
        before, run = server.asked.total(), run_of(project, f"relabel = 1\n{oracle}")
        label_slices(run, ["web"], ["val-00"])
        return server.asked.total() - before

    heuristic, model = 'kind = "heuristic"', model_of(server)
    assert label(heuristic) == 0
    count = label(model)
    assert count > 3
    files = contents(project / "labels" / "val")
    for other in (heuristic, f"extract_embedded = true\n{model}", f"{model}\nmax_new = 1024"):
        assert label(other) == 0
        assert contents(project / "labels" / "val") != files
    assert label(f"{model}\nreasoning_effort = 'high'") == count
    assert label(model) == 0
    assert contents(project / "labels" / "val") == files


def test_only_answers_that_the_limit_cut_are_asked_again_with_a_higher_limit(
    project: Path, server: JudgeServer
) -> None:
    """And a lower limit takes the answers that it gave before."""
    cut = completion('{"helpfulness', reason="length")

    def behave(document: str, nth: int) -> Reply:
        return cut if len(document) % 2 == 0 and not nth else completion(GOOD)

    def label(limit: int) -> tuple[int, bytes]:
        before = server.asked.total()
        run = run_of(project, f"{model_of(server)}\nmax_new = {limit}")
        label_slices(run, ["web"], ["train-00"])
        scores = (project / "labels/train/shard_0/scores.jsonl").read_text()
        grades = [json.loads(line).get("scores") for line in scores.splitlines()]
        return server.asked.total() - before, json.dumps(grades).encode()

    server.behave = behave
    num_asked, first = label(10)
    num_cut = json.loads(first).count(None)
    assert num_asked == first.count(b"helpfulness") + num_cut > num_cut > 0
    num_asked, second = label(100)
    assert (num_asked, json.loads(second).count(None)) == (num_cut, 0)
    assert label(10) == (0, first)
    assert label(50) == (0, second)


def test_the_noise_of_sampling_is_measured_with_draws_of_their_own(
    project: Path, server: JudgeServer
) -> None:
    """No draw repeats another document's random numbers, or a request that a retry sent."""
    server.behave = lambda d, nth: completion(GOOD) if nth else completion("no scores")
    run = run_of(project, f"relabel = 9\nmax_retries = 2\n{model_of(server)}")
    label_slices(run, ["web"], [f"val-0{i}" for i in range(8)])
    sent = [json.dumps(r | {"model": ""}, sort_keys=True) for r in server.requests]
    assert len(set(sent)) == len(sent)
    drawn = list((project / "labels/val").glob("shard_*/resampled/scores.jsonl"))
    texts = {record["text_sha256"] for path in drawn for record in read_records(path)}
    seeds = [r["seed"] for r in server.requests if r["temperature"] == 1 and r["seed"] > 2]
    assert len(set(seeds)) == len(seeds) == len(texts) > 3


def test_a_text_in_several_slices_is_estimated_and_asked_once(
    tmp_path: Path, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Words(FakeTokenizer):
        def encode_long(self, text: str, max_tokens: int) -> np.ndarray:
            return np.zeros(len(text.split()), np.uint32)

    monkeypatch.setattr("nmoe_core.labels.jobs.load_tokenizer", lambda _: Words())
    documents = [[i % 40 + 1, 2, 3] for i in range(600)]
    write_source(tmp_path / "data", "web", documents)
    write_source_slices(Tree.below(tmp_path, data=tmp_path / "data"), "web")
    run = run_of(tmp_path, f"relabel = 2\n{model_of(server)}")
    labelling = labelling_of(run)
    estimate = labelling.estimate(labelling.slice_jobs(["web"]))["all"]
    label_slices(run, ["web"])
    assert server.asked.total() == estimate.questions
    assert len(server.asked) == 40
    again = [r for r in server.requests if r["temperature"] == 0]
    assert len({json.dumps(r["messages"]) for r in again}) == len(again)


def test_labels_are_estimated_and_refused_above_max_cost_before_any_request(
    project: Path,
    server: JudgeServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.always(completion(GOOD, usage={"completion_tokens": 9}))
    prices = "\ninput_price = 1e6\noutput_price = 1e6\nmax_new = 50\naccept_model = ['{}']\n"
    oracle = f"relabel = 2\n{HTTP}{prices}max_cost = ".format(server.url, MODEL)

    def estimate(*more: str) -> dict[str, dict[str, Any]]:
        run = run_of(project, f"{oracle}0")
        slices = more or [*(f"train-0{i}" for i in range(4)), "val-00", "val-01"]
        labelling = labelling_of(run)
        rows = labelling.estimate(labelling.slice_jobs(["web"], slices))
        return {name: asdict(row) for name, row in rows.items()}

    before = estimate()
    total = before.pop("all")
    assert {key: sum(row[key] for row in before.values()) for key in total} == total
    # And two more labels of the few documents that show the oracle's noise.
    lists = [read_slice(project / f"slices/{key[:-3]}_shard_{key[-2:]}") for key in before]
    again = [2 * min(2, len(rows)) if "val" in key else 0 for key, rows in zip(before, lists)]
    assert total["questions"] == sum(map(len, lists)) + sum(again)
    assert total["tokens_out"] == 50 * total["questions"]
    assert total["cost"] == total["tokens_in"] + total["tokens_out"]
    for is_whole, most in ((False, before["train-00"]["cost"] - 1), (True, total["cost"])):
        with refused("E-LABEL-COST"):
            run = run_of(project, f"{oracle}{most}")
            label_slices(run, ["web"], ["train-00"], is_whole_budget=is_whole)
    assert not server.asked
    run = run_of(project, f"{oracle}{total['cost']}")
    label_slices(run, ["web"], before)
    assert server.asked.total() == total["questions"]
    sent = [json.dumps(request["messages"]) for request in server.requests]
    num_tokens = sum(len(tokens_of(text)) for text in sent)
    assert 0.8 * num_tokens < total["tokens_in"] < 1.3 * num_tokens
    label_slices(run_of(project, f"{oracle}0"), ["web"], before)
    after = estimate()["all"]
    assert after == {"questions": 0, "tokens_in": 0, "tokens_out": 0, "cost": 0}
    rest = estimate("train-04")["all"]
    assert rest["tokens_out"] == 9 * rest["questions"] > 0
    rows = project / "slices/train_shard_04"
    flags = [f"--set=oracle.http.model={MODEL}", f"--set=oracle.http.base_url={server.url}"]
    flags += ["--input-docids", rows, "--data-root", project / "data", "--out", project / "out"]
    command = ["hydra", "oracle-label", "--oracle", "http", "--estimate", *flags]
    said_of_all = said(capsys, *command)["all"]
    assert (said_of_all["tokens_in"], said_of_all["cost"]) == (rest["tokens_in"], None)
    num_answers = sum(map(len, lists))
    for least, length in ((num_answers, 9), (num_answers + 1, 50)):
        monkeypatch.setattr("nmoe_core.labels.cost.MIN_ANSWERS", least)
        assert estimate("train-04")["all"]["tokens_out"] == length * rest["questions"]


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
        (HTTP.format("http://h") + "\nmax_cost = 1", "max_cost needs"),
        (HTTP.format("http://h") + "\ninput_price = 1", "input_price and output_price, or neither"),
        ("[oracle.engine]\nmax_contxt = 5", "max_ctx"),
        ("max_retries = -1", "max_retries"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, oracle: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        run_of(tmp_path, oracle)
