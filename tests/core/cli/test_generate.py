"""`nmoe generate`: every prompt once, in order, after any kill, and never two makings in a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from nmoe_core.cli import main  # noqa: E402
from nmoe_core.engine import BatchedGenerator, Transformer, make_tiny_checkpoint  # noqa: E402

NUM_PROMPTS = 12
SIZES = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 32, "num_experts": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "checkpoint"
    return make_tiny_checkpoint(directory, vocab_size=300, **SIZES)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"id": f"p{i}", "tokens": [7] * 20 + [i, 3 * i]} for i in range(NUM_PROMPTS)]
    return _write(tmp_path / "prompts.jsonl", rows)


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _command(prompts: Path, checkpoint: Path, *more: str) -> list[str]:
    output = str(prompts.parent / "out.jsonl")
    command = ["generate", str(prompts), "-o", output, "--checkpoint", str(checkpoint)]
    options = ["--max-tokens", "5", "--max-seq-len", "64", "--max-batch", "4", "--threads", "1"]
    return [*command, *options, "--stop-ids", "--quiet", *more]


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _refused(capsys: pytest.CaptureFixture[str], command: list[str]) -> str:
    assert main(command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_prompts_are_completed_in_their_order(prompts: Path, checkpoint: Path, capsys):
    assert main([*_command(prompts, checkpoint), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["completions"], facts["new"], facts["new_tokens"]) == (12, 12, 60)
    records = _records(prompts.parent / "out.jsonl")
    assert [record["id"] for record in records] == [f"p{i}" for i in range(NUM_PROMPTS)]
    rows = [json.loads(line)["tokens"] for line in prompts.read_text().splitlines()]
    generator = BatchedGenerator(Transformer.from_checkpoint(checkpoint), 64, 4)
    assert [record["tokens"] for record in records] == generator.generate_batch(rows, 5)
    assert {record["finish_reason"] for record in records} == {"length"}
    assert {record["num_prompt_tokens"] for record in records} == {22}
    assert "text" not in records[0]


def test_a_second_run_does_nothing_and_new_prompts_are_appended(prompts, checkpoint, capsys):
    command = [*_command(prompts, checkpoint, "--temperature", "1"), "--json"]
    main(command)
    before = (prompts.parent / "out.jsonl").read_bytes()
    capsys.readouterr()
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["new"] == 0
    assert (prompts.parent / "out.jsonl").read_bytes() == before
    with open(prompts, "a") as file:
        file.write(json.dumps({"id": "late", "tokens": [1]}) + "\n")
    assert main(command) == 0
    after = (prompts.parent / "out.jsonl").read_bytes()
    assert after.startswith(before)
    assert json.loads(after[len(before) :])["id"] == "late"


@pytest.mark.parametrize(
    "kill_at", [2, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 7, 12))]
)
def test_a_killed_run_goes_on_to_the_bytes_of_an_undisturbed_one(
    prompts: Path, checkpoint: Path, tmp_path: Path, kill_at: int
):
    command = _command(prompts, checkpoint, "--temperature", "0.9", "--seed", "4")
    output = tmp_path / "out.jsonl"
    assert main(command) == 0
    whole = output.read_bytes()
    output.unlink()
    (tmp_path / "out.jsonl.made_with.json").unlink()
    # Half a batch is in the file's buffer when the process is killed: what it wrote is less.
    env = os.environ | {"NMOE_FAILPOINT": f"write:{kill_at + 1}:kill", "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m", "nmoe_core", *command]
    killed = subprocess.run(run, env=env, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    part = output.read_bytes()
    assert whole.startswith(part)
    assert part != whole
    with open(output, "ab") as file:
        file.write(whole[len(part) : len(part) + 25])
    assert main(command) == 0
    assert output.read_bytes() == whole


@pytest.mark.parametrize("cut", [1, 30])
def test_a_torn_tail_is_cut_off_wherever_it_tore(prompts, checkpoint, cut: int):
    output = prompts.parent / "out.jsonl"
    main(_command(prompts, checkpoint))
    whole = output.read_bytes()
    for size in range(len(whole) - 200, len(whole), cut * 17):
        output.write_bytes(whole[:size])
        assert main(_command(prompts, checkpoint)) == 0
        assert output.read_bytes() == whole


def test_shards_together_are_the_whole(prompts: Path, checkpoint: Path, tmp_path: Path):
    options = ("--temperature", "0.8")
    main(_command(prompts, checkpoint, *options))
    whole = {record["id"]: record for record in _records(tmp_path / "out.jsonl")}
    seen: dict[str, Any] = {}
    for i in range(3):
        assert main(_command(prompts, checkpoint, *options, "--shard", f"{i}/3")) == 0
        part = _records(tmp_path / f"out-0000{i}-of-00003.jsonl")
        assert [record["id"] for record in part] == [f"p{j}" for j in range(i, NUM_PROMPTS, 3)]
        seen |= {record["id"]: record for record in part}
    assert seen == whole


def test_stop_ids_end_a_completion(prompts: Path, checkpoint: Path):
    main(_command(prompts, checkpoint))
    output = prompts.parent / "out.jsonl"
    first = _records(output)[0]["tokens"]
    output.unlink()
    command = _command(prompts, checkpoint)
    at = command.index("--stop-ids")
    assert main([*command[: at + 1], str(first[2]), *command[at + 1 :]]) == 0
    record = _records(output)[0]
    assert record["tokens"] == first[: first.index(first[2])]
    assert record["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--temperature", "0.5"], "found temperature 0.0, expected 0.5"),
        (["--max-tokens", "6"], "max_tokens"),
        (["--dtype", "bfloat16"], "dtype"),
        (["--batch-invariant"], "batch_invariant"),
    ],
)
def test_completions_of_other_settings_are_refused_and_left_alone(
    prompts: Path, checkpoint: Path, capsys, more: list[str], says: str
):
    main(_command(prompts, checkpoint))
    output = prompts.parent / "out.jsonl"
    before = output.read_bytes()
    capsys.readouterr()
    line = _refused(capsys, [*_command(prompts, checkpoint), *more])
    assert line.startswith("ERROR [E-CONFIG-MIXED]")
    assert says in line
    assert output.read_bytes() == before


def test_completions_of_another_model_or_other_prompts_are_refused(
    prompts: Path, checkpoint: Path, tmp_path: Path, capsys
):
    main(_command(prompts, checkpoint))
    other = make_tiny_checkpoint(tmp_path / "other", vocab_size=300, seed=1, **SIZES)
    capsys.readouterr()
    assert "found model " in _refused(capsys, _command(prompts, other))
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    rows[3]["tokens"][0] = 8
    _write(prompts, rows)
    assert "id 'p3' in line 4" in _refused(capsys, _command(prompts, checkpoint))
    _write(prompts, rows[:3])
    assert "more records than prompts" in _refused(capsys, _command(prompts, checkpoint))
    output = tmp_path / "out.jsonl"
    output.write_bytes(b"{}\n" + output.read_bytes())
    _write(prompts, rows)
    line = _refused(capsys, _command(prompts, checkpoint))
    assert line.startswith("ERROR [E-COMPLETIONS-CORRUPT]")
    assert "out.jsonl:1" in line


@pytest.mark.parametrize(
    ("row", "code", "says"),
    [
        ({"id": "p0", "tokens": [1]}, "E-SOURCE-RECORD", "id 'p0' again"),
        ({"id": "x", "tokens": []}, "E-CONFIG-GENERATE", "empty"),
        ({"id": "x", "tokens": [1] * 60}, "E-CONFIG-GENERATE", "60 and 5 tokens"),
        ({"id": "x", "tokens": [300]}, "E-TOKENIZER-VOCAB", "300"),
        ({"id": "x", "tokens": [1.5]}, "E-SOURCE-RECORD", "prompts.jsonl:13"),
        ({"id": "x", "tokens": [True]}, "E-SOURCE-RECORD", "list of ids"),
        ({"id": "x"}, "E-SOURCE-RECORD", "text"),
        ({"id": "x", "text": "a", "tokens": [1]}, "E-SOURCE-RECORD", "both"),
        ({"id": 3, "tokens": [1]}, "E-SOURCE-RECORD", "no id"),
        ({"id": "\ud800", "tokens": [1]}, "E-SOURCE-RECORD", "surrogate"),
        ({"id": "x", "text": "a\udc00"}, "E-SOURCE-RECORD", "surrogate"),
    ],
)
def test_a_bad_prompt_is_one_line_and_nothing_is_written(
    prompts: Path, checkpoint: Path, capsys, row: dict[str, Any], code: str, says: str
):
    with open(prompts, "a") as file:
        file.write(json.dumps(row) + "\n")
    line = _refused(capsys, _command(prompts, checkpoint))
    assert line.startswith(f"ERROR [{code}]")
    assert says in line
    assert sorted(path.name for path in prompts.parent.iterdir()) == ["prompts.jsonl"]


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (["--shard", "3/3"], "E-CONFIG-SHARD"),
        (["--shard", "1"], "E-CONFIG-SHARD"),
        (["--temperature", "-1"], "E-CONFIG-SAMPLING"),
        (["--max-batch", "0"], "E-CONFIG-GENERATE"),
        (["--checkpoint", "nowhere"], "E-CHECKPOINT-MISSING"),
    ],
)
def test_wrong_options_are_one_line_and_nothing_is_written(
    prompts: Path, checkpoint: Path, capsys, more: list[str], code: str
):
    line = _refused(capsys, [*_command(prompts, checkpoint), *more])
    assert line.startswith(f"ERROR [{code}]")
    assert sorted(path.name for path in prompts.parent.iterdir()) == ["prompts.jsonl"]


@pytest.mark.parametrize("failing", ["write:1:ENOSPC", "write:2:ENOSPC", "write:9:EIO"])
def test_a_full_disk_is_one_line_and_the_next_run_goes_on(
    prompts: Path, checkpoint: Path, capsys, monkeypatch: pytest.MonkeyPatch, failing: str
):
    command, output = _command(prompts, checkpoint), prompts.parent / "out.jsonl"
    main(command)
    whole = output.read_bytes()
    output.unlink()
    (prompts.parent / "out.jsonl.made_with.json").unlink()
    capsys.readouterr()
    with monkeypatch.context() as failure:
        failure.setattr("nmoe_core.base.atomic._steps", Counter())
        failure.setenv("NMOE_FAILPOINT", failing)
        assert _refused(capsys, command).startswith("ERROR [E-IO]")
    assert whole.startswith(output.read_bytes())
    assert main(command) == 0
    assert output.read_bytes() == whole


@pytest.mark.parametrize("content", [b"one line, no end", b"two\nlines", b'{"id": "p0"}\n'])
def test_a_file_that_is_no_output_is_left_alone(
    prompts: Path, checkpoint: Path, capsys, content: bytes
):
    output = prompts.parent / "out.jsonl"
    output.write_bytes(content)
    _refused(capsys, _command(prompts, checkpoint))
    assert output.read_bytes() == content
    single = prompts.parent / "single.jsonl"
    single.write_text('{"id": "p", "tokens": [1]}')
    command = ["generate", str(single), "-o", str(single), "--checkpoint", str(checkpoint)]
    _refused(capsys, [*command, "--max-tokens", "2", "--max-seq-len", "8", "--quiet"])
    assert single.read_text() == '{"id": "p", "tokens": [1]}'


def test_records_without_a_whole_sidecar_are_refused(prompts: Path, checkpoint: Path, capsys):
    main(_command(prompts, checkpoint))
    sidecar = prompts.parent / "out.jsonl.made_with.json"
    whole = sidecar.read_bytes()
    for part in (whole[: len(whole) // 2], b"", b"{}"):
        sidecar.write_bytes(part)
        assert "found code not recorded" in _refused(capsys, _command(prompts, checkpoint))
        assert sidecar.read_bytes() == part


def test_what_is_no_file_of_prompts_is_refused_before_the_model_is_loaded(
    prompts: Path, checkpoint: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Transformer, "from_checkpoint", None)
    os.mkfifo(prompts.parent / "pipe")
    for name in ("nowhere", "pipe", "."):
        line = _refused(capsys, _command(prompts.parent / name, checkpoint))
        assert line.startswith("ERROR [E-SOURCE-MISSING]")
    assert not (prompts.parent / "out.jsonl").exists()


def test_an_output_that_cannot_be_made_is_one_line(prompts: Path, checkpoint: Path, capsys):
    command = [*_command(prompts, checkpoint), "-o", str(prompts / "out.jsonl")]
    assert _refused(capsys, command).startswith("ERROR [E-IO]")
    command = [*_command(prompts, checkpoint), "-o", str(prompts.parent)]
    assert _refused(capsys, command).startswith("ERROR [E-IO]")


def test_two_processes_do_not_write_one_file(prompts: Path, checkpoint: Path, capsys):
    import fcntl

    with open(prompts.parent / "out.jsonl", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        line = _refused(capsys, _command(prompts, checkpoint))
    assert line.startswith("ERROR [E-LOCKED]")


def test_text_prompts_come_back_as_text(tmp_path: Path):
    checkpoint = make_tiny_checkpoint(tmp_path / "checkpoint", **SIZES)
    texts = ["Rewrite this: the cat sat.", "Rewrite this: naïve café <|return|>"]
    rows = [{"id": str(i), "text": text} for i, text in enumerate(texts)]
    prompts = _write(tmp_path / "prompts.jsonl", rows)
    assert main(_command(prompts, checkpoint)) == 0
    from nmoe_core.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer()
    for record, text in zip(_records(tmp_path / "out.jsonl"), texts, strict=True):
        ids = tokenizer.encode_batch([text]).ids
        assert record["num_prompt_tokens"] == len(ids)
        assert record["text"] == tokenizer.decode(record["tokens"])
