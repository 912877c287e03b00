"""Completions of a file of prompts: JSON lines in, JSON lines out, in the order of the prompts.

A prompt is an object with `text` (a string, tokenised with no special tokens) or `tokens` (a list
of ids), and an `id` of its own. Records are appended as soon as all before them are made; a killed
run loses what was in the making or waited for that. The next one cuts a torn line off, checks that
the records are those of these prompts, and goes on behind them. What they were made with stands in
a file beside them, `<output>.made_with.json`, written before the first; an output made with another
model or other settings, or any file without that one, is refused and left alone. Every prompt is
read and checked before anything is written. Costs two readings of the prompts.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nmoe_core.base.atomic import failpoint, fsync_dir, write_json
from nmoe_core.base.errors import ConfigError, FormatError, LockedError, SourceError
from nmoe_core.base.fingerprint import Fingerprints, recorded, sha256_json

if TYPE_CHECKING:
    from nmoe_core.engine import BatchedGenerator, Completion
    from nmoe_core.engine.devices import Shard
    from nmoe_core.text.tokenizer import Tokenizer

COMPLETIONS_CODE = "completions/1"
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """How completions are made; prompt i of the file is sampled with seed `seed + i`."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()

    def request(self, prompt: Prompt) -> Any:
        """What the generator is asked for."""
        from nmoe_core.engine import Request, Sampling

        sampling = Sampling(self.temperature, self.top_p, self.top_k, self.seed + prompt.place)
        return Request(prompt.tokens, self.max_tokens, sampling, frozenset(self.stop_ids))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, with its place in the file."""

    place: int
    prompt_id: str
    tokens: list[int]
    is_text: bool

    @property
    def digest(self) -> str:
        """Name of its tokens."""
        return sha256_json(self.tokens)[:16]


@dataclass(frozen=True, slots=True)
class Report:
    """Records in all, those made now, and the new tokens in these."""

    path: Path
    num_records: int
    num_new: int
    num_new_tokens: int


def complete_file(
    prompts: Path,
    output: Path,
    generator: BatchedGenerator,
    settings: Settings,
    load_tokenizer: Callable[[], Tokenizer],
    shard: Shard,
    progress: Progress | None = None,
) -> Report:
    """Complete the prompts that have no record yet.

    Args:
        prompts: JSON lines, see above.
        output: JSON lines of `id, prompt_sha256, num_prompt_tokens, tokens, finish_reason`, and
            `text` where the prompt was one. A part of several has its number in the file's name.
        generator: Idle.
        settings: How to go on from a prompt.
        load_tokenizer: Called if a prompt is text.
        shard: Part of the prompts to complete: those whose place in the file, from 0, is
            `index` modulo `count`.
        progress: Called with the number of records after each.

    Raises:
        SourceError: A line is no prompt, or an id comes twice (E-SOURCE-RECORD); the prompts are
            no file that can be read twice (E-SOURCE-MISSING).
        ConfigError: A prompt does not fit (E-CONFIG-GENERATE), or the output was made with other
            prompts, another model or other settings (E-CONFIG-MIXED).
        TokenizerError: A token is outside the model's vocabulary (E-TOKENIZER-VOCAB).
        FormatError: The output is broken before its last line (E-COMPLETIONS-CORRUPT).
        LockedError: Another process writes this output (E-LOCKED).
    """
    check_is_file(prompts)
    reader = _Reader(prompts, shard, load_tokenizer)
    fingerprints = reader.check(generator, settings)
    path = _part_path(output, shard)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        _lock(file, path)
        num_done = _resume(file, path, fingerprints, reader)
        num_new_tokens, num_records = 0, num_done
        pending = islice(reader, num_done, None)
        for prompt, completion in _in_order(pending, generator, settings):
            record = _record(prompt, completion, reader)
            file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            failpoint("write")
            file.flush()
            num_records += 1
            num_new_tokens += len(completion.tokens)
            if progress is not None:
                progress(num_records)
        os.fsync(file.fileno())
    return Report(path, num_records, num_records - num_done, num_new_tokens)


def check_is_file(prompts: Path) -> None:
    """Refuse what is not there or, like a pipe, can be read once only.

    Raises:
        SourceError: Not a file (E-SOURCE-MISSING).
    """
    if not prompts.is_file():
        raise SourceError(
            "no file of prompts here",
            where=prompts,
            expected="a file, since it is read twice",
            code="E-SOURCE-MISSING",
        )


def _part_path(output: Path, shard: Shard) -> Path:
    if shard.count == 1:
        return output
    return output.with_stem(f"{output.stem}-{shard.index:05d}-of-{shard.count:05d}")


class _Reader:
    """Prompts of one shard, read from the file each time they are asked for."""

    def __init__(self, path: Path, shard: Shard, load_tokenizer: Callable[[], Tokenizer]) -> None:
        self._path = path
        self._shard = shard
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """Loaded with the first use."""
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        return self._tokenizer

    def __iter__(self) -> Iterator[Prompt]:
        with open(self._path, "rb") as file:
            for place, line in enumerate(file):
                if place % self._shard.count == self._shard.index:
                    yield self._prompt(place, line)

    def check(self, generator: BatchedGenerator, settings: Settings) -> Fingerprints:
        """Refuse what cannot be completed; returns what the completions will be made with."""
        seen: set[str] = set()
        for prompt in self:
            if prompt.prompt_id in seen:
                raise self._bad(prompt.place, f"id {prompt.prompt_id!r} again", "ids used once")
            seen.add(prompt.prompt_id)
            generator.check(settings.request(prompt))
        return {
            "code": COMPLETIONS_CODE,
            "model": generator.model.digest,
            "dtype": str(generator.model.embedding.dtype).removeprefix("torch."),
            "batch_invariant": str(generator.batch_invariant),
            "tokenizer": "none" if self._tokenizer is None else self._tokenizer.fingerprint,
            "shard": f"{self._shard.index}/{self._shard.count}",
            **{name: str(getattr(settings, name)) for name in Settings.__slots__},
        }

    def _prompt(self, place: int, line: bytes) -> Prompt:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._bad(place, f"{error}", "one JSON object") from None
        if not isinstance(row, dict) or not isinstance(row.get("id"), str):
            raise self._bad(place, "no id", "an object with a string as id")
        text, tokens = row.get("text"), row.get("tokens")
        try:
            f"{row['id']}{text}".encode()
        except UnicodeEncodeError:
            raise self._bad(place, "half a surrogate pair", "text that UTF-8 can hold") from None
        if isinstance(text, str) and tokens is None:
            ids = self.tokenizer.encode_batch([text]).ids.tolist()
            return Prompt(place, row["id"], ids, True)
        if text is None and isinstance(tokens, list) and all(type(t) is int for t in tokens):
            return Prompt(place, row["id"], tokens, False)
        raise self._bad(place, "neither or both", "text (a string) or tokens (a list of ids)")

    def _bad(self, place: int, found: str, expected: str) -> SourceError:
        where = f"{self._path}:{place + 1}"
        return SourceError(
            "not a prompt", where=where, found=found, expected=expected, code="E-SOURCE-RECORD"
        )


def _in_order(
    prompts: Iterator[Prompt], generator: BatchedGenerator, settings: Settings
) -> Iterator[tuple[Prompt, Completion]]:
    """Prompts and their completions, in the order of the prompts."""
    asked: dict[int, Prompt] = {}
    ready: dict[int, Completion] = {}

    def requests() -> Iterator[Any]:
        for index, prompt in enumerate(prompts):
            asked[index] = prompt
            yield settings.request(prompt)

    following = 0
    for completion in generator.complete(requests()):
        ready[completion.index] = completion
        while following in ready:
            yield asked.pop(following), ready.pop(following)
            following += 1


def _record(prompt: Prompt, completion: Completion, reader: _Reader) -> dict[str, Any]:
    record: dict[str, Any] = {
        "id": prompt.prompt_id,
        "prompt_sha256": prompt.digest,
        "num_prompt_tokens": len(prompt.tokens),
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
    }
    return record | ({"text": reader.tokenizer.decode(completion.tokens)} if prompt.is_text else {})


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LockedError(
            "another process is writing this file", where=path, do="wait for it, or end it"
        ) from None


def _resume(file: IO[bytes], path: Path, fingerprints: Fingerprints, reader: _Reader) -> int:
    """Cut a torn line off, and count the records, which must be those of the first prompts."""
    made_with = path.with_name(f"{path.name}.made_with.json")
    num_records, size_bytes = 0, 0
    file.seek(0)
    for prompt, line in zip(reader, _whole_lines(file)):
        _check_record(path, num_records + 1, line, prompt)
        num_records, size_bytes = num_records + 1, size_bytes + len(line)
    file.seek(size_bytes)
    rest = file.read()
    if b"\n" in rest:
        raise _mixed(path, "more records than prompts", "records of these prompts")
    began = recorded(made_with)
    if (num_records or rest) and began != fingerprints:
        raise _mixed(path, *_first_difference(began or {}, fingerprints))
    file.truncate(size_bytes)
    file.seek(size_bytes)
    if began != fingerprints:
        write_json(made_with, {"fingerprints": fingerprints})
    fsync_dir(path.parent)
    return num_records


def _whole_lines(file: IO[bytes]) -> Iterator[bytes]:
    for line in file:
        if line.endswith(b"\n"):
            yield line


def _check_record(path: Path, number: int, line: bytes, prompt: Prompt) -> None:
    try:
        record = json.loads(line)
        found = record["id"], record["prompt_sha256"]
    except (ValueError, KeyError, TypeError):
        raise FormatError(
            "the line is not a completion",
            where=f"{path}:{number}",
            do="cut the file before this line and run again",
            code="E-COMPLETIONS-CORRUPT",
        ) from None
    if found != (prompt.prompt_id, prompt.digest):
        raise _mixed(path, f"id {found[0]!r} in line {number}", f"{prompt.prompt_id!r}, same text")


def _first_difference(began: Fingerprints, wanted: Fingerprints) -> tuple[str, str]:
    key = next((key for key in wanted if began.get(key) != wanted[key]), "code")
    return f"{key} {began.get(key, 'not recorded')}", wanted[key]


def _mixed(path: Path, found: str, expected: str) -> ConfigError:
    return ConfigError(
        "the completions that lie here were made from something else",
        where=path,
        found=found,
        expected=expected,
        do="write to another file, or delete this one",
        code="E-CONFIG-MIXED",
    )
