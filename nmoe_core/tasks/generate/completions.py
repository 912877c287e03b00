"""Completes a file of prompts, and appends each completion when it ends.

All prompts are read and checked before the output is written, so the file is read twice. A prompt
that the model cannot complete gets a record with the reason. The next run removes an incomplete
last line, checks that the records belong to these prompts, and completes what has no record. The
model and the settings are recorded in `<output>.made_with.json` before the first record; output of
another model or other settings, or output without this file, is refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loader.files.nested import json_value
from nmoe_core.base.append_log import AppendLog
from nmoe_core.base.atomic import fsync_dir, write_json
from nmoe_core.base.errors import ConfigError, FormatError, TokenizerError
from nmoe_core.base.fingerprint import Fingerprints, first_difference, recorded
from nmoe_core.base.progress import Meter
from nmoe_core.base.result import Result
from nmoe_core.base.settings import expert_fingerprints
from nmoe_core.tasks.generate.prompts import Prompt, Prompts, Settings
from nmoe_core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nmoe_core.engine import BatchedGenerator, Completion, Request

COMPLETIONS_CODE = "completions/2"
# Tokens beyond the bytes of a stop string that are decoded to find it.
_MARGIN = 8
_MAX_WARNINGS = 10
_LOG = logging.getLogger(__name__)


class Asked(NamedTuple):
    """One sample of a prompt."""

    prompt: Prompt
    sample: int


@dataclass(slots=True)
class Work:
    """What the prompts of a file ask for.

    Attributes:
        digests: The digest of each prompt, by id.
        num_records: Number of records that the output will have.
        refused: Prompts that the model cannot complete, with the reason as `error`, by id.
        done: Ids and samples of the records in the output.
    """

    digests: dict[str, str] = field(default_factory=dict)
    num_records: int = 0
    refused: dict[str, Prompt] = field(default_factory=dict)
    done: set[tuple[str, int]] = field(default_factory=set)


def complete_file(
    prompts: Prompts, output: Path, generator: BatchedGenerator, settings: Settings
) -> Result:
    """Complete the prompts that have no record in the output yet.

    Args:
        prompts: Prompts of one shard.
        output: JSON lines, see docs/formats.md. If there are several shards, the file name has the
            shard's number.
        generator: An idle generator.
        settings: Settings of the prompts that do not have their own.

    Returns:
        A result with the facts `completions` (all), `new` (of this run), `refused` (all) and
        `new_tokens`.

    Raises:
        SourceError: A line is not a prompt, or an id appears twice (E-SOURCE-RECORD), or the file
            is missing (E-SOURCE-MISSING).
        ConfigError: A setting is out of range (E-CONFIG-GENERATE, E-CONFIG-SAMPLING), or the output
            was made with other prompts, another model or other settings (E-CONFIG-MIXED).
        CheckpointError: The chat template cannot be used (E-CHECKPOINT-TEMPLATE).
        FormatError: A line of the output other than the last is damaged (E-COMPLETIONS-CORRUPT).
        LockedError: Another process is writing this output (E-LOCKED).
    """
    prompts.require_file()
    shard = prompts.shard
    if shard.count > 1:
        output = output.with_stem(f"{output.stem}-{shard.index:05d}-of-{shard.count:05d}")
    if prompts.date is None:
        began = recorded(_sidecar(output)) or {}
        prompts = replace(prompts, date=began.get("date", date.today().isoformat()))
    completer = _Completer(prompts, generator, settings)
    work = completer.check()
    with AppendLog(output) as log:
        completer.resume(log, work)
        num_new = work.num_records - len(work.done)
        num_new_tokens = 0
        meter = Meter(f"complete {prompts.path.name}", num_new, "completions")
        for record in completer.records(work):
            log.append(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            num_new_tokens += len(record["tokens"])
            meter.add()
        log.sync()
        facts = {
            "output": str(log.path),
            "completions": work.num_records,
            "new": num_new,
            "refused": len(work.refused),
            "new_tokens": num_new_tokens,
        }
        return Result(log.sha256, facts)


@dataclass(frozen=True)
class _Completer:
    prompts: Prompts
    generator: BatchedGenerator
    settings: Settings

    @cached_property
    def decoder(self) -> Tokenizer | None:
        """The tokenizer for the texts of completions; None if there is none, or if it cannot be
        loaded, which only a prompt of token ids allows."""
        tokenizer = self.prompts.known_tokenizer
        try:
            if tokenizer is not None:
                tokenizer.decode([])
        except TokenizerError as error:
            _LOG.warning("completions have no text: %s", error)
            return None
        return tokenizer

    def check(self) -> Work:
        """Read and check all prompts."""
        self.settings.check(self.generator.model.config.vocab_size)
        longest = self.generator.max_seq_len - 1
        if self.settings.max_tokens > longest:
            raise ConfigError(
                "max_tokens leaves no room for a prompt",
                found=self.settings.max_tokens,
                expected=f"at most {longest} (max_seq_len - 1)",
                code="E-CONFIG-GENERATE",
            )
        work = Work()
        num_spelling = 0
        for prompt in self._prompts():
            if prompt.prompt_id in work.digests:
                raise self.prompts.again(prompt.line, prompt.prompt_id)
            work.digests[prompt.prompt_id] = prompt.digest
            num_spelling += prompt.spells is not None
            if num_spelling == 1 and prompt.spells is not None:
                text = "%s spells the special token %s, which is read as ordinary text"
                _LOG.warning(text, self._where(prompt), prompt.spells)
            error = prompt.error or self._error(prompt)
            if error is None:
                work.num_records += prompt.settings.n
                continue
            work.num_records += 1
            work.refused[prompt.prompt_id] = prompt._replace(error=error)
            if len(work.refused) <= _MAX_WARNINGS:
                _LOG.warning("%s cannot be completed: %s", self._where(prompt), error)
        if len(work.refused) > _MAX_WARNINGS:
            _LOG.warning("%d prompts cannot be completed", len(work.refused))
        if num_spelling > 1:
            _LOG.warning("%d prompts spell special tokens; see --special-tokens", num_spelling)
        return work

    def resume(self, log: AppendLog, work: Work) -> None:
        """Remove an incomplete last line, and find the records that are there already."""
        path = _sidecar(log.path)
        made_with = self._made_with()
        began = recorded(path)
        if began != made_with and log.path.stat().st_size:
            key = first_difference(began or {}, made_with) or "code"
            found = f"{key} {(began or {}).get(key, 'not recorded')}"
            raise _mixed(log.path, found, made_with.get(key, "none"))
        for line in log.lines():
            where = f"{log.path}:{line.number}"
            try:
                record = json_value(line.payload)
                done = (str(record["id"]), int(record["sample"]))
                digest = record["prompt_sha256"]
            except (ValueError, KeyError, TypeError):
                raise _corrupt(where, "not a completion") from None
            if work.digests.get(done[0]) != digest:
                found = f"id {done[0]!r} with another prompt or other settings"
                raise _mixed(where, found, "completions of these prompts")
            if done in work.done:
                raise _corrupt(where, f"sample {done[1]} of id {done[0]!r} again")
            work.done.add(done)
        log.cut()
        if began != made_with:
            write_json(path, {"fingerprints": made_with})
        fsync_dir(path.parent)

    def records(self, work: Work) -> Iterator[dict[str, Any]]:
        """The records that are not in the output yet, in the order in which they end."""
        for prompt in work.refused.values():
            if (prompt.prompt_id, 0) not in work.done:
                yield self._start(Asked(prompt, 0)) | {
                    "tokens": [],
                    "finish_reason": "refused",
                    "error": f"{self._where(prompt)}: {prompt.error}",
                }
        running: dict[int, Asked] = {}

        def requests() -> Iterator[Request]:
            for index, asked in enumerate(self._missing(work)):
                running[index] = asked
                yield self._request(asked)

        for completion in self.generator.complete(requests()):
            yield self._record(running.pop(completion.index), completion)

    def _prompts(self) -> Iterator[Prompt]:
        return self.prompts.read(self.settings, self.generator.model.config.vocab_size)

    def _missing(self, work: Work) -> Iterator[Asked]:
        for prompt in self._prompts():
            if prompt.prompt_id not in work.refused:
                for sample in range(prompt.settings.n):
                    if (prompt.prompt_id, sample) not in work.done:
                        yield Asked(prompt, sample)

    def _request(self, asked: Asked) -> Request:
        from nmoe_core.engine import Request

        prompt, sample = asked
        settings = prompt.settings
        return Request(
            prompt.tokens,
            settings.max_tokens,
            settings.sampling(prompt.prompt_id, sample),
            frozenset(self.prompts.end_ids if settings.stop_ids is None else settings.stop_ids),
            _Stopper(self.prompts.tokenizer, prompt) if settings.stop else None,
            settings.logprobs,
        )

    def _error(self, prompt: Prompt) -> str | None:
        """Why the model cannot complete a prompt."""
        request = self._request(Asked(prompt, 0))
        try:
            self.generator.check(request)
        except (ConfigError, TokenizerError) as error:
            return str(error)
        return None

    def _where(self, prompt: Prompt) -> str:
        return f"{self.prompts.path}:{prompt.line} (id {prompt.prompt_id!r})"

    def _start(self, asked: Asked) -> dict[str, Any]:
        return {
            "id": asked.prompt.prompt_id,
            "sample": asked.sample,
            "prompt_sha256": asked.prompt.digest,
            "num_prompt_tokens": len(asked.prompt.tokens),
        }

    def _record(self, asked: Asked, completion: Completion) -> dict[str, Any]:
        prompt = asked.prompt
        reason = completion.finish_reason
        stopped_by: int | str | None = completion.stop_id
        text = None
        if self.decoder is not None:
            text = self.decoder.continuation(prompt.tokens, completion.tokens)
            places = {text.find(stop): stop for stop in prompt.settings.stop if stop in text}
            if places:
                reason = "stop"
                stopped_by = places[min(places)]
                text = text[: min(places)]
        record = self._start(asked) | {
            "tokens": completion.tokens,
            "finish_reason": reason,
            "stop_reason": stopped_by,
        }
        if text is not None:
            record["text"] = text
        if prompt.settings.logprobs:
            record["logprobs"] = completion.logprobs
        return record

    def _made_with(self) -> Fingerprints:
        """What made the completions; the digest of a prompt covers what made its tokens."""
        model = self.generator.model
        prompts = self.prompts
        tokenizer = prompts.known_tokenizer
        return {
            "code": COMPLETIONS_CODE,
            "model": model.digest,
            "dtype": str(model.embedding.dtype).removeprefix("torch."),
            "batch_invariant": str(self.generator.batch_invariant),
            **expert_fingerprints(model.runtime.experts.name),
            "tokenizer": "none" if tokenizer is None else tokenizer.fingerprint,
            "date": str(prompts.date),
            "special_tokens": str(prompts.reads_specials),
            "end_ids": str(prompts.end_ids),
            "shard": f"{prompts.shard.index}/{prompts.shard.count}",
            **{name: str(value) for name, value in self.settings.model_dump().items()},
        }


class _Stopper:
    """Whether the new tokens of a prompt contain one of its stop strings. Only the last tokens are
    decoded, as many as the longest string has bytes, and a few more."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt.tokens
        self._stops = prompt.settings.stop
        self._size = max(len(stop.encode()) for stop in self._stops) + _MARGIN

    def __call__(self, new: list[int]) -> bool:
        start = max(0, len(new) - self._size)
        text = self._tokenizer.continuation(new[:start] or self._prompt, new[start:])
        return any(stop in text for stop in self._stops)


def _sidecar(output: Path) -> Path:
    return output.with_name(f"{output.name}.made_with.json")


def _corrupt(where: str, found: str) -> FormatError:
    return FormatError(
        "the line is not a completion of these prompts",
        where=where,
        found=found,
        do="truncate the file before this line and run again",
        code="E-COMPLETIONS-CORRUPT",
    )


def _mixed(where: object, found: str, expected: str) -> ConfigError:
    return ConfigError(
        "the output has completions of other prompts, another model or other settings",
        where=where,
        found=found,
        expected=expected,
        do="write to another file, or delete this file",
        code="E-CONFIG-MIXED",
    )
