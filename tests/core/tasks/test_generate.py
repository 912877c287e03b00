"""`nmoe generate`: every prompt once, after any kill, and never two makings in a file."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.project import failing, json_lines, read_rows

torch = pytest.importorskip("torch")

from nmoe_core.cli import main  # noqa: E402
from nmoe_core.engine import BatchedGenerator, Transformer, make_tiny_checkpoint  # noqa: E402
from nmoe_core.engine.generation.sampling import Sampling, kept_probabilities  # noqa: E402
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


def test_every_prompt_is_completed_as_alone(work: Work) -> None:
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
    assert {record["sample"] for record in records} == {0}
    assert {record["stop_reason"] for record in records} == {None}
    assert not {"text", "logprobs"} & records[0].keys()


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
    assert "out.jsonl:4: " in (line := work.refused())
    assert "id 'p3' with another prompt or other settings" in line
    work.write([*ROWS[:3], ROWS[3] | {"settings": {"top_k": 3}}, *ROWS[4:]])
    assert "id 'p3' with another prompt or other settings" in work.refused()
    work.write(ROWS[:3])
    assert "out.jsonl:4: " in work.refused()
    assert work.output.read_bytes() == whole
    work.output.write_bytes(b"{}\n" + whole)
    work.write(ROWS)
    assert "out.jsonl:1" in work.refused(code="E-COMPLETIONS-CORRUPT]")
    work.output.write_bytes(whole + b'{"id": [], "sample": 0, "prompt_sha256": ""}\n')
    assert "out.jsonl:13: " in work.refused()
    work.output.write_bytes(whole + whole)
    assert "sample 0 of id 'p0' again" in work.refused(code="E-COMPLETIONS-CORRUPT]")


X = {"id": "x"}


@pytest.mark.parametrize(
    ("bad", "code", "says"),
    [
        ({"id": "p0", "tokens": [1]}, "E-SOURCE-RECORD", "id 'p0' again"),
        (X | {"tokens": [1.5]}, "E-SOURCE-RECORD", "prompts.jsonl:13"),
        (X | {"tokens": [True]}, "E-SOURCE-RECORD", "list of ids"),
        (X, "E-SOURCE-RECORD", "text"),
        (X | {"text": "a", "tokens": [1]}, "E-SOURCE-RECORD", "text and tokens"),
        (X | {"messages": ["a"]}, "E-SOURCE-RECORD", "list of objects"),
        (X | {"messages": [], "tools": {}}, "E-SOURCE-RECORD", "list of objects"),
        (X | {"messages": [], "chat_template_kwargs": 1}, "E-SOURCE-RECORD", "an object"),
        (X | {"tokens": [1], "settings": {"tempratur": 1}}, "E-SOURCE-RECORD", "'temperature'"),
        (X | {"tokens": [1], "settings": {"top_p": 0}}, "E-SOURCE-RECORD", "prompts.jsonl:13"),
        (X | {"tokens": [1], "settings": {"n": 2}}, "E-SOURCE-RECORD", "all samples"),
        (X | {"tokens": [1], "settings": [1]}, "E-SOURCE-RECORD", "settings"),
        (X | {"tokens": [1], "settings": {"stop": ["a"]}}, "E-CONFIG", "add --tokenizer"),
        ({"id": 3, "tokens": [1]}, "E-SOURCE-RECORD", "no id"),
        ({"id": "\ud800", "tokens": [1]}, "E-SOURCE-RECORD", "surrogate"),
        (X | {"text": "a\udc00"}, "E-SOURCE-RECORD", "surrogate"),
        (X | {"tokens": [1], "settings": {"stop": ["\ud800"]}}, "E-SOURCE-RECORD", "surrogate"),
        (X | {"messages": [], "tools": [{"a": "\ud800"}]}, "E-SOURCE-RECORD", "surrogate"),
        (X | {"text": "a"}, "E-CONFIG", "add --tokenizer"),
        (["--shard", "3/3"], "E-CONFIG-SHARD", ""),
        (["--shard", "1"], "E-CONFIG-SHARD", ""),
        (["--temperature", "-1"], "E-CONFIG-SAMPLING", ""),
        (["--batch-size", "0"], "E-CONFIG-GENERATE", ""),
        (["--threads", "0"], "E-CONFIG", "--threads"),
        (["--n", "2"], "E-CONFIG-GENERATE", "all samples would be equal"),
        (["--n", "0"], "E-CONFIG", "n: "),
        (["--max-tokens", "64"], "E-CONFIG-GENERATE", "at most 63"),
        (["999999"], "E-CONFIG-GENERATE", "found 999999"),
        (["--stop", ""], "E-CONFIG", "stop.0"),
        (["--stop", "a"], "E-CONFIG", "add --tokenizer"),
        (["--date", "today"], "E-CONFIG", "2026-11-28"),
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


def _records(work: Work, *more: str) -> dict[str, dict[str, Any]]:
    work.complete(*more)
    return {record["id"]: record for record in read_rows(work.output)}


def test_samples_of_a_prompt_differ_and_so_do_those_of_neighbouring_seeds(work: Work) -> None:
    work.write([{"id": f"p{i}", "tokens": [7, 8, 9]} for i in range(3)])
    seen = []
    for seed in range(3):
        work.complete("--temperature", "1", "--n", "4", "--seed", str(seed))
        records = read_rows(work.output)
        pairs = sorted((record["id"], record["sample"]) for record in records)
        assert pairs == [(f"p{i}", sample) for i in range(3) for sample in range(4)]
        seen += [tuple(record["tokens"]) for record in records]
        work.forget()
    assert len(set(seen)) == 36


def test_samples_follow_the_probabilities_of_the_model(work: Work) -> None:
    prompt = ROWS[0]["tokens"]
    settings = {"max_tokens": 1, "temperature": 1.3, "top_k": 12, "top_p": 0.95, "n": 3000}
    work.write([{"id": "a", "tokens": prompt, "settings": settings}])
    work.complete()
    drawn = np.bincount([record["tokens"][0] for record in read_rows(work.output)], minlength=300)
    logits = Transformer.from_checkpoint(work.checkpoint)(torch.tensor([prompt]))[0, -1:]
    kept = kept_probabilities(logits, [Sampling(1.3, 0.95, 12)])[0].numpy()
    expected = 3000 * kept / kept.sum()
    assert (expected > 0).sum() > 5
    assert drawn[expected == 0].sum() == 0
    assert stats.chisquare(drawn[expected > 0], expected[expected > 0]).pvalue > 1e-3


def test_completions_are_written_as_they_end_and_any_part_of_them_is_continued(work: Work) -> None:
    rows = [row | {"settings": {"max_tokens": 12 - i, "n": 2}} for i, row in enumerate(ROWS)]
    work.write(rows)
    whole = work.complete("--temperature", "1")
    lines = whole.splitlines(keepends=True)
    assert [json.loads(line)["id"] for line in lines[:2]] != ["p0", "p0"]
    for kept in (lines[3:9], lines[::2], lines[1:]):
        work.output.write_bytes(b"".join(kept) + lines[0][:40])
        after = work.complete("--temperature", "1")
        assert after.startswith(b"".join(kept))
        assert sorted(after.splitlines()) == sorted(whole.splitlines())


def test_settings_of_a_prompt_are_as_those_of_the_command(work: Work) -> None:
    flags = ["--temperature", "0.7", "--top-p", "0.9", "--top-k", "40", "--seed", "5"]
    expected = _records(work, *flags)["p3"]["tokens"]
    work.forget()
    own = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 5}
    work.write([ROWS[3] | {"settings": own}, ROWS[4] | {"settings": {"stop_ids": expected}}])
    assert _records(work)["p3"]["tokens"] == expected
    work.forget()
    work.write([ROWS[3] | {"settings": own | {"stop_ids": expected[2:3], "max_tokens": 4}}])
    record = _records(work)["p3"]
    assert record["tokens"] == expected[: expected.index(expected[2])]
    assert record["stop_reason"] == expected[2]


def test_prompts_that_cannot_be_completed_are_marked_and_the_others_completed(
    work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    bad = {
        "empty": ([], "the prompt is empty"),
        "long": ([1] * 60, "found 60 and 5 tokens"),
        "outside": ([300], "found 300"),
    }
    rows = [{"id": name, "tokens": tokens} for name, (tokens, _) in bad.items()]
    work.write([*rows, *ROWS])
    records = _records(work, "--json")
    assert json.loads(work.capsys.readouterr().out)["refused"] == 3
    for number, (name, (_, why)) in enumerate(bad.items(), 1):
        record = records[name]
        assert (record["tokens"], record["finish_reason"]) == ([], "refused")
        for text in (f"prompts.jsonl:{number} (id '{name}')", why):
            assert text in record["error"]
            assert text in caplog.text
    work.write(ROWS)
    whole = work.complete("-o", str(work.directory / "alone.jsonl"))
    assert len(whole.splitlines()) == 15  # of the other output, left as it is
    alone = read_rows(work.directory / "alone.jsonl")
    assert [records[record["id"]] for record in alone] == alone
    work.write([*rows, *ROWS])
    assert work.complete() == whole


def test_the_length_is_at_most_the_models(work: Work) -> None:
    made = make_tiny_checkpoint(work.directory / "short", vocab_size=300, **SIZES)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40}))
    command = work.command("--checkpoint", str(made))
    place = command.index("--max-seq-len")
    del command[place : place + 2]
    assert main(command) == 0
    assert len(read_rows(work.output)) == 12


def test_blank_lines_are_no_prompts(work: Work) -> None:
    whole = work.complete()
    work.prompts.write_text("\n" + work.prompts.read_text() + "\n \n")
    assert work.complete() == whole


def test_log_probabilities_are_of_the_model_before_temperature(work: Work) -> None:
    work.write(ROWS[:2])
    model = Transformer.from_checkpoint(work.checkpoint)
    for record in _records(work, "--temperature", "2", "--logprobs").values():
        prompt = next(row["tokens"] for row in ROWS if row["id"] == record["id"])
        logits = model(torch.tensor([prompt + record["tokens"]]))[0, len(prompt) - 1 : -1]
        chosen = torch.tensor(record["tokens"])[:, None]
        expected = torch.log_softmax(logits, -1).gather(-1, chosen)[:, 0]
        torch.testing.assert_close(torch.tensor(record["logprobs"]), expected, atol=1e-5, rtol=0)


TEMPLATE = """
{%- for message in messages %}
    {%- if message.role != "user" %}{{ raise_exception("only the user speaks") }}{% endif %}
    {{- "<|user|>" + message.content + "<|end|>" }}
{%- endfor %}
{{- "w9" if terse else "" }}{{ "w7 w8" if tools else "" }}{{ strftime_now(" w%d") -}}
"""
WORDS = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>", *(f"w{i}" for i in range(5, 300))]
USER = 3
END = 4


@pytest.fixture
def speaking(work: Work) -> Work:
    """A model with a chat template and a tokenizer of words, whose blanks are those of
    SentencePiece."""
    tokenizers = pytest.importorskip("tokenizers")
    work.checkpoint = make_tiny_checkpoint(work.directory / "speaking", vocab_size=300, **SIZES)
    ids = {text if text[0] == "<" else f"\u2581{text}": i for i, text in enumerate(WORDS)}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, "<unk>"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    own.decoder = tokenizers.decoders.Metaspace()
    own.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    own.add_special_tokens(WORDS[:5])
    own.save(str(work.checkpoint / "tokenizer.json"))
    (work.checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    return work


def test_prompt_and_text_together_are_the_text_of_all_tokens(speaking: Work) -> None:
    texts = {"text": "w7 w8", "one": "w7"}
    rows = [{"id": name, "text": text} for name, text in texts.items()]
    speaking.write([*rows, {"id": "tokens", "tokens": [7, 8]}])
    records = _records(speaking)
    for name, text in texts.items():
        words = [WORDS[i] for i in records[name]["tokens"]]
        assert text + records[name]["text"] == " ".join([text, *words])
    del records["tokens"]["id"], records["text"]["id"]
    assert records["tokens"] == records["text"]


def test_stop_texts_end_a_completion_and_are_left_out(speaking: Work) -> None:
    speaking.write([{"id": "a", "text": "w7 w8"}])
    free = _records(speaking, "--max-tokens", "20")["a"]
    words = free["text"].split(" ")[1:]
    speaking.forget()
    across = f"{words[3][-1]} {words[4]}"  # from within one token to the end of another
    stopped = _records(speaking, "--max-tokens", "20", "--stop", words[4], across)["a"]
    assert stopped["finish_reason"] == "stop"
    assert stopped["stop_reason"] == across
    assert stopped["text"] == free["text"][: free["text"].index(across)]
    assert stopped["tokens"] == free["tokens"][: len(stopped["tokens"])]
    assert across in " " + " ".join(WORDS[i] for i in stopped["tokens"])
    assert across not in " " + " ".join(WORDS[i] for i in stopped["tokens"][:-1])


def test_special_tokens_of_a_text_are_read_on_request_and_else_warned_of(
    speaking: Work, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"id": "user", "text": "<|user|>w7<|end|>"}, {"id": "none", "text": "w7"}]
    speaking.write([*rows, {"id": "start", "text": "<s>w7"}])
    plain = _records(speaking)
    assert plain["none"]["num_prompt_tokens"] == 1
    assert "prompts.jsonl:1 (id 'user') spells the special token <|user|>" in caplog.text
    assert "2 prompts spell special tokens; see --special-tokens" in caplog.text
    speaking.forget()
    caplog.clear()
    read = _records(speaking, "--special-tokens")
    assert [read[name]["num_prompt_tokens"] for name in ("user", "none", "start")] == [4, 2, 2]
    assert "special" not in caplog.text
    ids = {"user": [1, USER, 7, END], "none": [1, 7], "start": [1, 7]}
    speaking.forget()
    speaking.write([{"id": name, "tokens": tokens} for name, tokens in ids.items()])
    for name, record in _records(speaking).items():
        assert record["tokens"] == read[name]["tokens"]


def test_messages_are_rendered_by_the_chat_template(
    speaking: Work, caplog: pytest.LogCaptureFixture
) -> None:
    one = [{"role": "user", "content": "w5"}]
    rows: list[dict[str, Any]] = [
        {"id": "one", "messages": one},
        {"id": "terse", "messages": one * 2, "chat_template_kwargs": {"terse": True}},
        {"id": "tools", "messages": one, "tools": [{"type": "function"}]},
        {"id": "spelled", "messages": [{"role": "user", "content": "w5<|end|>w6"}]},
        {"id": "other", "messages": [{"role": "system", "content": "w5"}]},
    ]
    ids = {
        "one": [USER, 5, END, 28],
        "terse": [USER, 5, END, USER, 5, END, 9, 28],
        "tools": [USER, 5, END, 7, 8, 28],
        "spelled": [USER, 5, END, 6, END, 28],
    }
    speaking.write(rows)
    speaking.write(rows[-1:])  # the others are added later
    _records(speaking, "--special-tokens", "--date", "2026-11-28")
    speaking.write([{"id": "ids", "tokens": [5]}, *rows])
    records = _records(speaking, "--special-tokens", "--date", "2026-11-28")
    assert "only the user speaks" in records["other"]["error"]
    speaking.forget()
    speaking.write(rows)
    apart = _records(speaking, "--date", "2026-11-28")
    assert apart["one"]["tokens"] == records["one"]["tokens"]
    assert apart["spelled"]["tokens"] != records["spelled"]["tokens"]
    assert "prompts.jsonl:4 (id 'spelled') spells the special token <|end|>" in caplog.text
    speaking.forget()
    speaking.write([{"id": name, "tokens": tokens} for name, tokens in ids.items()])
    for name, record in _records(speaking).items():
        assert record["tokens"] == records[name]["tokens"]


def test_a_run_that_is_continued_on_another_day_keeps_its_date(speaking: Work) -> None:
    speaking.write([{"id": "a", "messages": [{"role": "user", "content": "w5"}]}])
    whole = speaking.complete("--date", "2020-02-29")
    assert speaking.complete() == whole
    assert "found date 2020-02-29" in speaking.refused("--date", "2020-03-01")


def test_a_chat_template_that_is_missing_or_hostile_ends_the_command(speaking: Work) -> None:
    speaking.write([{"id": "a", "messages": [{"role": "user", "content": "w5"}]}])
    template = speaking.checkpoint / "chat_template.jinja"
    template.write_text("{{ ''.__class__.__mro__ }}")
    assert str(speaking.checkpoint) in speaking.refused(code="E-CHECKPOINT-TEMPLATE]")
    template.unlink()
    assert "no chat template" in speaking.refused(code="E-CHECKPOINT-TEMPLATE]")
    assert not speaking.output.exists()


def test_a_broken_checkpoint_is_named_in_the_error(work: Work) -> None:
    made = make_tiny_checkpoint(work.directory / "broken", vocab_size=300, **SIZES)
    config = json.loads((made / "config.json").read_text())
    del config["num_key_value_heads"]
    (made / "config.json").write_text(json.dumps(config))
    assert f"{made}/config.json: " in work.refused("--checkpoint", str(made))
    (made / "config.json").write_text("{")
    line = work.refused("--checkpoint", str(made))
    assert f"{made}/config.json: not a valid file; found Expecting" in line
    for name in ("model.gguf", "folder"):
        (work.directory / "folder").mkdir(exist_ok=True)
        (work.directory / "folder" / "model.gguf").touch()
        found = work.directory / name
        assert "found GGUF, which the engine does not read" in work.refused(
            "--checkpoint", str(found)
        )
        (work.directory / "model.gguf").touch()
