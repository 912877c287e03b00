"""`nmoe generate`: completes a file of prompts, in the order of the file.

A prompt is an object with a unique `id` and `text` (a string, tokenised without special tokens) or
`tokens` (a list of ids). All prompts are read and checked before the output is written, so the file
is read twice. A record is appended as soon as all earlier records are complete. The next run
removes an incomplete last line, checks that the records belong to these prompts, and continues
after the last record. The model and the settings are recorded in `<output>.made_with.json` before
the first record; output of another model or other settings, or output without this file, is
refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loader.files.nested import json_value
from loader.plan.settings import TOKENIZER_FILES
from nmoe_core.base.append_log import AppendLog
from nmoe_core.base.atomic import fsync_dir, write_json
from nmoe_core.base.errors import ConfigError, FormatError, SourceError
from nmoe_core.base.fingerprint import Fingerprints, recorded, sha256_json
from nmoe_core.base.jsonl import parse_object, read_lines
from nmoe_core.base.progress import Meter
from nmoe_core.base.result import Result
from nmoe_core.base.settings import TokenizerSettings, expert_fingerprints
from nmoe_core.text.models import model_tokenizer
from nmoe_core.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from nmoe_core.engine import BatchedGenerator, Completion, Request
    from nmoe_core.engine.devices import Shard

COMPLETIONS_CODE = "completions/1"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of completions; prompt i of the file is sampled with seed `seed + i`."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop_ids: tuple[int, ...]

    def request(self, prompt: Prompt) -> Request:
        from nmoe_core.engine import Request, Sampling

        sampling = Sampling(self.temperature, self.top_p, self.top_k, self.seed + prompt.place)
        return Request(prompt.tokens, self.max_tokens, sampling, frozenset(self.stop_ids))


class Prompt(NamedTuple):
    place: int
    prompt_id: str
    tokens: list[int]
    is_text: bool

    @property
    def digest(self) -> str:
        """SHA-256 of the tokens."""
        return sha256_json(self.tokens)[:16]


@dataclass(frozen=True)
class Prompts:
    """The prompts of one shard of a JSONL file, read again in each iteration. The shard has the
    prompts whose number in the file, from 0, is `index` modulo `count`."""

    path: Path
    shard: Shard
    checkpoint: Path
    tokenizer_name: str | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The given tokenizer, else the checkpoint's, loaded on first use. Raises ConfigError if
        there is no tokenizer."""
        if self.tokenizer_name is not None:
            return load_tokenizer(TokenizerSettings(self.tokenizer_name, needs_eos=False))
        from nmoe_core.engine.weights.checkpoint import open_checkpoint

        with open_checkpoint(self.checkpoint) as opened:
            found = model_tokenizer(self.checkpoint, opened.config.vocab_size)
        if found is None:
            raise ConfigError(
                "prompts are text, and the checkpoint has no tokenizer",
                where=self.checkpoint,
                expected=" or ".join(TOKENIZER_FILES),
                do="add --tokenizer",
            )
        return load_tokenizer(found)

    def __iter__(self) -> Iterator[Prompt]:
        for line in read_lines(self.path, lambda number, why: self._bad(number - 1, why)):
            place = line.number - 1
            if place % self.shard.count == self.shard.index:
                yield self._prompt(place, line.payload)

    def require_file(self) -> None:
        """Raise SourceError if the file is missing or, like a pipe, can be read only once
        (E-SOURCE-MISSING)."""
        if not self.path.is_file():
            raise SourceError(
                "the prompts are not a regular file",
                where=self.path,
                expected="a file that can be read twice",
                code="E-SOURCE-MISSING",
            )

    def check(self, generator: BatchedGenerator, settings: Settings) -> None:
        """Check that the generator can complete all prompts; raises as `complete_file`."""
        self.require_file()
        seen: set[str] = set()
        for prompt in self:
            if prompt.prompt_id in seen:
                raise self._bad(prompt.place, f"id {prompt.prompt_id!r} again", "unique ids")
            seen.add(prompt.prompt_id)
            generator.check(settings.request(prompt))

    def _prompt(self, place: int, line: bytes) -> Prompt:
        try:
            row = parse_object(line)
        except ValueError as error:
            raise self._bad(place, str(error)) from None
        if not isinstance(row.get("id"), str):
            raise self._bad(place, "no id", "an object with a string as id")
        text = row.get("text")
        tokens = row.get("tokens")
        try:
            f"{row['id']}{text}".encode()
        except UnicodeEncodeError:
            raise self._bad(place, "half a surrogate pair", "valid Unicode text") from None
        if isinstance(text, str) and tokens is None:
            ids = self.tokenizer.encode_batch([text]).ids.tolist()
            return Prompt(place, row["id"], ids, True)
        if text is None and isinstance(tokens, list) and all(type(t) is int for t in tokens):
            return Prompt(place, row["id"], tokens, False)
        raise self._bad(place, "neither or both", "text (a string) or tokens (a list of ids)")

    def _bad(self, place: int, found: str, expected: str = "one JSON object") -> SourceError:
        where = f"{self.path}:{place + 1}"
        return SourceError(
            "not a prompt", where=where, found=found, expected=expected, code="E-SOURCE-RECORD"
        )


def complete_file(
    prompts: Prompts, output: Path, generator: BatchedGenerator, settings: Settings
) -> Result:
    """Complete the prompts that have no record in the output yet.

    Args:
        prompts: Prompts of one shard.
        output: JSON lines of `id, prompt_sha256, num_prompt_tokens, tokens, finish_reason`, and
            `text` if the prompt is text. If there are several shards, the file name has the shard's
            number.
        generator: An idle generator.
        settings: Settings of the completions.

    Returns:
        A result with the facts `completions` (all), `new` (of this run) and `new_tokens`.

    Raises:
        SourceError: A line is not a prompt, or an id appears twice (E-SOURCE-RECORD), or the file
            is missing (E-SOURCE-MISSING).
        ConfigError: A prompt does not fit (E-CONFIG-GENERATE), or the output was made with other
            prompts, another model or other settings (E-CONFIG-MIXED).
        TokenizerError: A token is outside the model's vocabulary (E-TOKENIZER-VOCAB).
        FormatError: A line of the output other than the last is damaged (E-COMPLETIONS-CORRUPT).
        LockedError: Another process is writing this output (E-LOCKED).
    """
    prompts.check(generator, settings)
    shard = prompts.shard
    if shard.count > 1:
        output = output.with_stem(f"{output.stem}-{shard.index:05d}-of-{shard.count:05d}")
    with AppendLog(output) as log:
        num_done = _resume(log, _made_with(prompts, generator, settings), prompts)
        num_new_tokens = 0
        num_records = num_done
        pending = islice(prompts, num_done, None)
        meter = Meter(f"complete {prompts.path.name}", None, "prompts")
        for prompt, completion in _in_order(pending, generator, settings):
            record: dict[str, Any] = {
                "id": prompt.prompt_id,
                "prompt_sha256": prompt.digest,
                "num_prompt_tokens": len(prompt.tokens),
                "tokens": completion.tokens,
                "finish_reason": completion.finish_reason,
            }
            if prompt.is_text:
                record["text"] = prompts.tokenizer.decode(completion.tokens)
            log.append(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            num_records += 1
            num_new_tokens += len(completion.tokens)
            meter.add()
        log.sync()
        facts = {
            "output": str(log.path),
            "completions": num_records,
            "new": num_records - num_done,
            "new_tokens": num_new_tokens,
        }
        return Result(log.sha256, facts)


def _made_with(prompts: Prompts, generator: BatchedGenerator, settings: Settings) -> Fingerprints:
    return {
        "code": COMPLETIONS_CODE,
        "model": generator.model.digest,
        "dtype": str(generator.model.embedding.dtype).removeprefix("torch."),
        "batch_invariant": str(generator.batch_invariant),
        **expert_fingerprints(generator.model.runtime.experts.name),
        # The tokenizer is needed only if a prompt is text.
        "tokenizer": prompts.tokenizer.fingerprint if "tokenizer" in vars(prompts) else "none",
        "shard": f"{prompts.shard.index}/{prompts.shard.count}",
        **{name: str(value) for name, value in asdict(settings).items()},
    }


def _in_order(
    prompts: Iterator[Prompt], generator: BatchedGenerator, settings: Settings
) -> Iterator[tuple[Prompt, Completion]]:
    """Prompts and their completions, in the order of the prompts."""
    asked: dict[int, Prompt] = {}
    ready: dict[int, Completion] = {}

    def requests() -> Iterator[Request]:
        for index, prompt in enumerate(prompts):
            asked[index] = prompt
            yield settings.request(prompt)

    following = 0
    for completion in generator.complete(requests()):
        ready[completion.index] = completion
        while following in ready:
            yield asked.pop(following), ready.pop(following)
            following += 1


def _resume(log: AppendLog, made_with: Fingerprints, prompts: Prompts) -> int:
    """Remove an incomplete last line, check that the records belong to the first prompts, and count
    them."""
    path = log.path.with_name(f"{log.path.name}.made_with.json")
    num_records = 0
    for prompt, line in zip(prompts, log.lines()):
        num_records += 1
        _check_record(log.path, num_records, line.payload, prompt)
    rest = log.rest()
    if b"\n" in rest:
        raise _mixed(log.path, "more records than prompts", "records of these prompts")
    began = recorded(path)
    if (num_records or rest) and began != made_with:
        began = began or {}
        key = next((key for key in made_with if began.get(key) != made_with[key]), "code")
        raise _mixed(log.path, f"{key} {began.get(key, 'not recorded')}", made_with[key])
    log.cut()
    if began != made_with:
        write_json(path, {"fingerprints": made_with})
    fsync_dir(path.parent)
    return num_records


def _check_record(path: Path, number: int, line: bytes, prompt: Prompt) -> None:
    try:
        record = json_value(line)
        found = record["id"], record["prompt_sha256"]
    except (ValueError, KeyError, TypeError):
        raise FormatError(
            "the line is not a completion",
            where=f"{path}:{number}",
            do="truncate the file before this line and run again",
            code="E-COMPLETIONS-CORRUPT",
        ) from None
    if found != (prompt.prompt_id, prompt.digest):
        raise _mixed(path, f"id {found[0]!r} in line {number}", f"{prompt.prompt_id!r}, same text")


def _mixed(path: Path, found: str, expected: str) -> ConfigError:
    return ConfigError(
        "the output has completions of other prompts, another model or other settings",
        where=path,
        found=found,
        expected=expected,
        do="write to another file, or delete this file",
        code="E-CONFIG-MIXED",
    )
