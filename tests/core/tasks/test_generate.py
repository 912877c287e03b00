"""`nmoe generate`: every prompt once, in order, after any kill, and never two makings in a file."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.project import failing, json_lines, read_rows

torch = pytest.importorskip("torch")

from nmoe_core.cli import main  # noqa: E402
from nmoe_core.engine import BatchedGenerator, Transformer, make_tiny_checkpoint  # noqa: E402
from nmoe_core.engine.weights.weight_files import end_ids  # noqa: E402
from nmoe_core.text.tokenizer import load_tokenizer  # noqa: E402
from tests.refusals import refused, refused_line  # noqa: E402

SIZES = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 32, "num_experts": 4}
ROWS = [{"id": f"p{i}", "tokens": [7] * 20 + [i, 3 * i]} for i in range(12)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "checkpoint"
    return make_tiny_checkpoint(directory, vocab_size=300, **SIZES)


@dataclass
class Work:
    """Prompts, a model, and the command that completes them."""

    directory: Path
    checkpoint: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def prompts(self) -> Path:
        return self.directory / "prompts.jsonl"

    @property
    def output(self) -> Path:
        return self.directory / "out.jsonl"

    @property
    def sidecar(self) -> Path:
        return self.directory / "out.jsonl.made_with.json"

    def write(self, rows: list[dict[str, Any]]) -> None:
        self.prompts.write_text(json_lines(rows))

    def command(self, *more: str, prompts: str = "prompts.jsonl") -> list[str]:
        named = [str(self.directory / prompts), "-o", str(self.output)]
        options = [
            "--max-tokens",
            "5",
            "--max-seq-len",
            "64",
            "--batch-size",
            "4",
            "--threads",
            "1",
        ]
        where = ["--checkpoint", str(self.checkpoint)]
        return ["generate", *named, *where, *options, "--quiet", "--stop-ids", *more]

    def complete(self, *more: str) -> bytes:
        """The output after the command."""
        assert main(self.command(*more)) == 0
        return self.output.read_bytes()

    def forget(self) -> None:
        self.output.unlink()
        self.sidecar.unlink()

    def refused(self, *more: str, code: str = "E-", prompts: str = "prompts.jsonl") -> str:
        return refused_line(self.capsys, *self.command(*more, prompts=prompts), code=code)


@pytest.fixture
def work(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> Work:
    made = Work(tmp_path, checkpoint, capsys)
    made.write(ROWS)
    return made


def test_prompts_are_completed_in_their_order(work: Work) -> None:
    work.complete("--json")
    facts = json.loads(work.capsys.readouterr().out)
    assert (facts["completions"], facts["new"], facts["new_tokens"]) == (12, 12, 60)
    records = read_rows(work.output)
    assert [record["id"] for record in records] == [row["id"] for row in ROWS]
    generator = BatchedGenerator(Transformer.from_checkpoint(work.checkpoint), 64, 4)
    expected = generator.generate_batch([row["tokens"] for row in ROWS], 5)
    assert [record["tokens"] for record in records] == expected
    assert {record["finish_reason"] for record in records} == {"length"}
    assert {record["num_prompt_tokens"] for record in records} == {22}
    assert "text" not in records[0]


def test_a_second_run_does_nothing_and_new_prompts_are_appended(work: Work) -> None:
    flags = ("--temperature", "1", "--json")
    before = work.complete(*flags)
    work.capsys.readouterr()
    assert work.complete(*flags) == before
    assert json.loads(work.capsys.readouterr().out)["new"] == 0
    work.write([*ROWS, {"id": "late", "tokens": [1]}])
    after = work.complete(*flags)
    assert after.startswith(before)
    assert json.loads(after[len(before) :])["id"] == "late"


@pytest.mark.parametrize(
    "kill_at", [2, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 7, 12))]
)
def test_a_killed_run_resumes_and_writes_the_same_bytes(work: Work, kill_at: int) -> None:
    flags = ("--temperature", "0.9", "--seed", "4")
    whole = work.complete(*flags)
    work.forget()
    # Half a batch is in the file's buffer when the process is killed: what it wrote is less.
    env = os.environ | {"NMOE_FAILPOINT": f"write:{kill_at + 1}:kill", "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m", "nmoe_core", *work.command(*flags)]
    killed = subprocess.run(run, env=env, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    part = work.output.read_bytes()
    assert whole.startswith(part)
    assert part != whole
    with open(work.output, "ab") as file:
        file.write(whole[len(part) : len(part) + 25])
    assert work.complete(*flags) == whole


def test_a_torn_tail_is_cut_off_wherever_it_tore(work: Work) -> None:
    whole = work.complete()
    for size in range(len(whole) - 200, len(whole), 17):
        work.output.write_bytes(whole[:size])
        assert work.complete() == whole


def test_shards_together_are_the_whole(work: Work) -> None:
    flags = ("--temperature", "0.8")
    work.complete(*flags)
    seen: dict[str, Any] = {}
    for i in range(3):
        assert main(work.command(*flags, "--shard", f"{i}/3")) == 0
        part = read_rows(work.directory / f"out-0000{i}-of-00003.jsonl")
        assert [record["id"] for record in part] == [row["id"] for row in ROWS[i::3]]
        seen |= {record["id"]: record for record in part}
    assert seen == {record["id"]: record for record in read_rows(work.output)}


IDS = [299, 99]


@pytest.mark.parametrize(
    ("own", "of_generation"),
    [
        (IDS, None),
        (299, {"eos_token_id": IDS}),
        (None, {"eos_token_id": IDS}),
        (IDS, {"eos_token_id": 299}),
        (None, None),
    ],
)
def test_all_the_ids_that_end_a_sequence_in_transformers_end_it(tmp_path, own, of_generation):
    transformers = pytest.importorskip("transformers")
    made = make_tiny_checkpoint(tmp_path / "model", family="llama", vocab_size=300, num_layers=2)
    ids = torch.randint(0, 300, (1, 9), generator=torch.Generator().manual_seed(0))
    free = Transformer.from_checkpoint(made)
    # The sixth token stands for 99 above.
    sixth = BatchedGenerator(free, 64, 1).generate_batch(ids.tolist(), 12)[0][5]
    own, of_generation = (
        json.loads(json.dumps(given).replace("99]", f"{sixth}]")) for given in (own, of_generation)
    )
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"eos_token_id": own}))
    if of_generation is not None:
        (made / "generation_config.json").write_text(json.dumps(of_generation))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    expected = theirs.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, 9:]
    (tmp_path / "p.jsonl").write_text(json_lines([{"id": "a", "tokens": ids[0].tolist()}]))
    where = [str(tmp_path / "p.jsonl"), "-o", str(tmp_path / "o.jsonl"), "--checkpoint", str(made)]
    assert main(["generate", *where, "--max-tokens", "12", "--max-seq-len", "64", "--quiet"]) == 0
    (row,) = read_rows(tmp_path / "o.jsonl")
    is_stopped = len(expected) < 12
    assert row["tokens"] == expected[: len(expected) - is_stopped].tolist()
    assert row["finish_reason"] == ("stop" if is_stopped else "length")


def test_where_the_generation_config_names_no_end_that_of_the_config_holds(work: Work) -> None:
    config = Transformer.from_checkpoint(work.checkpoint).config
    assert end_ids(work.checkpoint, config) == [299]
    for given, expected in (({"max_length": 40}, [299]), ({"eos_token_id": [3, 9]}, [3, 9])):
        made = make_tiny_checkpoint(work.directory / f"of_{expected[0]}", vocab_size=300, **SIZES)
        (made / "generation_config.json").write_text(json.dumps(given))
        assert end_ids(made, config) == expected
    (made / "generation_config.json").write_text('{"eos_token_id": [3, "9"]}')
    with refused("E-CHECKPOINT-CONFIG", "eos_token_id"):
        end_ids(made, config)


def test_stop_ids_end_a_completion(work: Work) -> None:
    work.complete()
    first = read_rows(work.output)[0]["tokens"]
    work.output.unlink()
    work.complete(str(first[2]))
    record = read_rows(work.output)[0]
    assert record["tokens"] == first[: first.index(first[2])]
    assert record["finish_reason"] == "stop"


def test_completions_of_other_settings_models_or_prompts_are_refused_and_left_alone(
    work: Work,
) -> None:
    whole = work.complete()
    other = make_tiny_checkpoint(work.directory / "other", vocab_size=300, seed=1, **SIZES)
    for more, says in {
        ("--temperature", "0.5"): "found temperature 0.0, expected 0.5",
        ("--max-tokens", "6"): "max_tokens",
        ("--dtype", "bfloat16"): "dtype",
        ("--batch-invariant",): "batch_invariant",
        ("--checkpoint", str(other)): "found model ",
    }.items():
        assert says in work.refused(*more, code="E-CONFIG-MIXED]")
    rows = [*ROWS[:3], {"id": "p3", "tokens": [8]}, *ROWS[4:]]
    work.write(rows)
    assert "id 'p3' in line 4" in work.refused()
    work.write(rows[:3])
    assert "more records than prompts" in work.refused()
    assert work.output.read_bytes() == whole
    work.output.write_bytes(b"{}\n" + whole)
    work.write(rows)
    assert "out.jsonl:1" in work.refused(code="E-COMPLETIONS-CORRUPT]")


X = {"id": "x"}


@pytest.mark.parametrize(
    ("bad", "code", "says"),
    [
        ({"id": "p0", "tokens": [1]}, "E-SOURCE-RECORD", "id 'p0' again"),
        (X | {"tokens": []}, "E-CONFIG-GENERATE", "empty"),
        (X | {"tokens": [1] * 60}, "E-CONFIG-GENERATE", "60 and 5 tokens"),
        (X | {"tokens": [300]}, "E-TOKENIZER-VOCAB", "300"),
        (X | {"tokens": [1.5]}, "E-SOURCE-RECORD", "prompts.jsonl:13"),
        (X | {"tokens": [True]}, "E-SOURCE-RECORD", "list of ids"),
        (X, "E-SOURCE-RECORD", "text"),
        (X | {"text": "a", "tokens": [1]}, "E-SOURCE-RECORD", "both"),
        ({"id": 3, "tokens": [1]}, "E-SOURCE-RECORD", "no id"),
        ({"id": "\ud800", "tokens": [1]}, "E-SOURCE-RECORD", "surrogate"),
        (X | {"text": "a\udc00"}, "E-SOURCE-RECORD", "surrogate"),
        (X | {"text": "a"}, "E-CONFIG", "add --tokenizer"),
        (["--shard", "3/3"], "E-CONFIG-SHARD", ""),
        (["--shard", "1"], "E-CONFIG-SHARD", ""),
        (["--temperature", "-1"], "E-CONFIG-SAMPLING", ""),
        (["--batch-size", "0"], "E-CONFIG-GENERATE", ""),
        (["--threads", "0"], "E-CONFIG", "--threads"),
        (["--checkpoint", "nowhere"], "E-CHECKPOINT-MISSING", "nowhere"),
    ],
)
def test_a_bad_prompt_or_option_is_one_line_and_nothing_is_written(
    work: Work, bad: dict[str, Any] | list[str], code: str, says: str
) -> None:
    work.write([*ROWS, bad] if isinstance(bad, dict) else ROWS)
    assert says in work.refused(*(bad if isinstance(bad, list) else ()), code=f"{code}]")
    assert [path.name for path in work.directory.iterdir()] == ["prompts.jsonl"]


@pytest.mark.parametrize("failpoint", ["write:1:ENOSPC", "write:2:ENOSPC", "write:9:EIO"])
def test_a_full_disk_is_one_line_and_the_next_run_resumes(work: Work, failpoint: str) -> None:
    whole = work.complete()
    work.forget()
    with failing(failpoint):
        work.refused(code="E-IO]")
    assert whole.startswith(work.output.read_bytes())
    assert work.complete() == whole


def test_a_file_that_is_no_output_or_lost_its_sidecar_is_left_alone(work: Work) -> None:
    for content in (b"one line, no end", b"two\nlines", b'{"id": "p0"}\n'):
        work.output.write_bytes(content)
        work.refused()
        assert work.output.read_bytes() == content
    single = b'{"id": "p", "tokens": [1]}'
    work.output.write_bytes(single)  # the prompts themselves
    work.refused(prompts="out.jsonl")
    assert work.output.read_bytes() == single
    work.output.unlink()
    work.complete()
    whole = work.sidecar.read_bytes()
    for part in (whole[: len(whole) // 2], b"", b"{}"):
        work.sidecar.write_bytes(part)
        assert "found code not recorded" in work.refused()
        assert work.sidecar.read_bytes() == part


def test_what_is_no_file_of_prompts_is_refused_before_the_model_is_loaded(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Transformer, "from_checkpoint", None)
    os.mkfifo(work.directory / "pipe")
    for name in ("nowhere", "pipe", "."):
        work.refused(prompts=name, code="E-SOURCE-MISSING]")
    assert not work.output.exists()


def test_an_output_that_cannot_be_made_or_is_written_by_another_is_one_line(work: Work) -> None:
    for output in (work.prompts / "out.jsonl", work.directory):
        work.refused("-o", str(output), code="E-IO]")
    with open(work.output, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        work.refused(code="E-LOCKED]")


def test_text_prompts_come_back_as_text(work: Work) -> None:
    work.checkpoint = make_tiny_checkpoint(work.directory / "checkpoint", **SIZES)
    texts = ["Rewrite this: the cat sat.", "Rewrite this: naïve café <|return|>"]
    work.write([{"id": str(i), "text": text} for i, text in enumerate(texts)])
    work.complete()
    tokenizer = load_tokenizer()
    for record, text in zip(read_rows(work.output), texts, strict=True):
        assert record["num_prompt_tokens"] == len(tokenizer.encode_batch([text]).ids)
        assert record["text"] == tokenizer.decode(record["tokens"])


def test_text_prompts_are_read_by_the_tokenizer_beside_the_weights(work: Work) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    work.checkpoint = make_tiny_checkpoint(work.directory / "checkpoint", vocab_size=300, **SIZES)
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 3, "cat": 5, "?": 0}, "?"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    own.save(str(work.checkpoint / "tokenizer.json"))
    work.write([{"id": "text", "text": "the cat cat"}])
    work.complete()
    tokens = read_rows(work.output)[0]["tokens"]
    work.forget()
    work.write([{"id": "ids", "tokens": [3, 5, 5]}])
    work.complete()
    assert read_rows(work.output)[0]["tokens"] == tokens
