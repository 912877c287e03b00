"""Tokenises the text of a trainer's run once into a cache: the plug-in that `loader` discovers.

Prep normalises and tokenises the text in order, in this process. The name of a cache directory
contains the digest of the text and of the tokenizer, so changed text gets a new directory. A
directory is complete or absent; one process makes it while the others on this machine wait. For
more than a few gigabytes, use `nmoe prep` instead.
"""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loader.files.locks import locked
from loader.plan.settings import RunSettings
from loader.plan.text_sources import TextSource
from nmoe_core.base.atomic import fsync_dir, replacing
from nmoe_core.base.errors import ConfigError, NmoeError
from nmoe_core.base.fingerprint import keep_digests, recall_digests, sha256_json
from nmoe_core.prep.journal import Journal
from nmoe_core.prep.run import prep_shards, write_manifest
from nmoe_core.prep.settings import PrepSettings, shard_format
from nmoe_core.sources.formats import kind_of
from nmoe_core.sources.open import open_source
from nmoe_core.sources.records import Split
from nmoe_core.sources.spec import SourceKind, SourceSpec

_MAX_DOC_TOKENS = 2**31
_SHARD_TOKENS = 2**26


def tokenised(source: TextSource, name: str, run: RunSettings) -> Path:
    """The directory of a source's shards; see `loader.plan.text_sources.tokenised`.

    Raises:
        ConfigError: The settings contradict each other.
        SourceError: Text is missing, cannot be read, or changed during the pass.
        TokenizerError: The tokenizer is unknown, cannot be read, or differs from the settings.
    """
    cache = Path(run.required("cache_dir", name))
    splits = {"train": _open(source, name, source.urls)}
    if source.valid_urls:
        splits["valid"] = _open(source, name, source.valid_urls)
    settings = _settings(name, run)
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name)
    digests = cache / f".{safe}-digests.json"
    recall_digests(digests)
    revisions = {split: [opened.revision(), repr(rows)] for split, (opened, rows) in splits.items()}
    identity = [source.spec, revisions, repr(shard_format(settings)), settings.identity()]
    target = cache / f"{safe}-{sha256_json(identity)[:16]}"
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / ".lock"), replacing(digests):
        # directories made from earlier versions of the text
        for left in cache.glob(f".{safe}-{'[0-9a-f]' * 16}"):
            if left != _aside(target):
                shutil.rmtree(left)
        keep_digests(digests, [p for opened, _ in splits.values() for p in opened.local_files()])
        if not target.is_dir():
            _make(target, splits, settings)
    return target


def _aside(target: Path) -> Path:
    """Directory in which shards are made before they are moved to `target`."""
    return target.with_name(f".{target.name}")


def _make(target: Path, splits: dict[str, Split], settings: PrepSettings) -> None:
    aside = _aside(target)
    try:
        for name, split in splits.items():
            prep_shards(split, settings, aside / name)
            write_manifest(settings, aside / name)
            staged = Journal(aside / name).directory
            if staged.exists():  # remove the directory now: later runs would not try again
                shutil.rmtree(staged)
    except NmoeError:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    os.rename(aside, target)
    fsync_dir(target.parent)


def _settings(name: str, run: RunSettings) -> PrepSettings:
    tokenizer = str(run.tokenizer_path or run.tokenizer)
    return PrepSettings(
        name=name,
        tokenizer=tokenizer,
        eos_token="auto" if run.eos_token_id is None else run.eos_token_id,
        num_shards=1,  # one shard, so that documents stay in order
        tokens_per_shard=_SHARD_TOKENS,
        min_doc_tokens=1,
        max_doc_tokens=_MAX_DOC_TOKENS,
        max_bad_share=0.0,
        vocabulary=run.vocabulary,
    )


def _open(source: TextSource, name: str, urls: Sequence[str]) -> Split:
    spec: dict[str, Any] = {"id": re.sub(r"\W", "_", name, flags=re.ASCII)}
    if source.repo:
        if source.revision and Path(source.repo).is_dir():
            found = repr(source.revision)
            raise ConfigError(
                "revision is set for a local directory", where=source.spec, found=found
            )
        spec |= {"hf_dataset": source.repo, "hf_subset": source.config or None}
        spec |= {"hf_split": source.split, "hf_revision": source.revision or None}
    else:
        kinds = sorted({_kind(url) for url in urls})
        if len(kinds) > 1:
            raise ConfigError(
                "one source has files of several kinds",
                where=f"source {name!r}",
                found=" and ".join(kinds),
                do="make one source per kind",
            )
        on_error = "replace" if kinds == ["files"] else "fail"
        spec |= {"kind": kinds[0], "paths": tuple(urls), "on_error": on_error}
    return open_source(SourceSpec(**spec, text_field=source.text_key), Path(), "train")


def _kind(url: str) -> SourceKind:
    return kind_of(url) or "files"
