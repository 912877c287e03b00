"""Completions of a file of prompts: JSON lines in, JSON lines out, in the order of the prompts.

Records are appended as soon as all before them are made; a killed run loses those that were being
made or waited. The next run cuts a torn line off, checks that the records belong to these prompts,
and continues behind them. The model and the settings are recorded beside the output, in
`<output>.made_with.json`, before the first record; an output of another model or other settings,
and any file without that record, is refused and left alone. Every prompt is read and checked before
anything is written. Costs two readings of the prompts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmoe_core.base.append_log import AppendLog
from nmoe_core.base.atomic import fsync_dir, write_json
from nmoe_core.base.errors import ConfigError, FormatError
from nmoe_core.base.fingerprint import Fingerprints, recorded
from nmoe_core.base.result import Result
from nmoe_core.tasks.generate.prompts import Prompt, Prompts, Settings

if TYPE_CHECKING:
    from nmoe_core.engine import BatchedGenerator, Completion
    from nmoe_core.engine.devices import Shard

COMPLETIONS_CODE = "completions/1"
Progress = Callable[[int], None]


def complete_file(
    prompts: Prompts,
    output: Path,
    generator: BatchedGenerator,
    settings: Settings,
    progress: Progress | None = None,
) -> Result:
    """Complete the prompts that have no record yet.

    Args:
        prompts: Those of one shard.
        output: JSON lines of `id, prompt_sha256, num_prompt_tokens, tokens, finish_reason`, and
            `text` where the prompt was one. One shard of several has its number in the file's name.
        generator: Idle.
        settings: How to continue a prompt.
        progress: Called with the number of records after each.

    Returns:
        Its facts are `completions` in all, the `new` ones and their `new_tokens`.

    Raises:
        SourceError: A line is no prompt, or an id comes twice (E-SOURCE-RECORD); the prompts are
            no file that can be read twice (E-SOURCE-MISSING).
        ConfigError: A prompt does not fit (E-CONFIG-GENERATE), or the output was made with other
            prompts, another model or other settings (E-CONFIG-MIXED).
        TokenizerError: A token is outside the model's vocabulary (E-TOKENIZER-VOCAB).
        FormatError: The output is broken before its last line (E-COMPLETIONS-CORRUPT).
        LockedError: Another process writes this output (E-LOCKED).
    """
    prompts.check(generator, settings)
    with AppendLog(_part_path(output, prompts.shard)) as log:
        num_done = _resume(log, _made_with(prompts, generator, settings), prompts)
        num_new_tokens, num_records = 0, num_done
        pending = islice(prompts, num_done, None)
        for prompt, completion in _in_order(pending, generator, settings):
            record = _record(prompt, completion, prompts)
            log.append(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            num_records += 1
            num_new_tokens += len(completion.tokens)
            if progress is not None:
                progress(num_records)
        log.sync()
        facts = {
            "output": str(log.path),
            "completions": num_records,
            "new": num_records - num_done,
            "new_tokens": num_new_tokens,
        }
        return Result(log.sha256, facts)


def _part_path(output: Path, shard: Shard) -> Path:
    if shard.count == 1:
        return output
    return output.with_stem(f"{output.stem}-{shard.index:05d}-of-{shard.count:05d}")


def _made_with(prompts: Prompts, generator: BatchedGenerator, settings: Settings) -> Fingerprints:
    return {
        "code": COMPLETIONS_CODE,
        "model": generator.model.digest,
        "dtype": str(generator.model.embedding.dtype).removeprefix("torch."),
        "batch_invariant": str(generator.batch_invariant),
        "tokenizer": prompts.tokenizer_name,
        "shard": f"{prompts.shard.index}/{prompts.shard.count}",
        **{name: str(getattr(settings, name)) for name in Settings.__slots__},
    }


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


def _record(prompt: Prompt, completion: Completion, prompts: Prompts) -> dict[str, Any]:
    record: dict[str, Any] = {
        "id": prompt.prompt_id,
        "prompt_sha256": prompt.digest,
        "num_prompt_tokens": len(prompt.tokens),
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
    }
    text = {"text": prompts.tokenizer.decode(completion.tokens)} if prompt.is_text else {}
    return record | text


def _resume(log: AppendLog, made_with: Fingerprints, prompts: Prompts) -> int:
    """Cut a torn line off, and count the records, which must be those of the first prompts."""
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


def _mixed(path: Path, found: str, expected: str) -> ConfigError:
    return ConfigError(
        "the completions that lie here were made from something else",
        where=path,
        found=found,
        expected=expected,
        do="write to another file, or delete this one",
        code="E-CONFIG-MIXED",
    )
