"""Text that is tokenised when a plan is made: a hub's dataset, or JSON lines and text files.

The tokens go to shards with a manifest in `cache_dir`, under the digest of the source's name, its
content's stamp and the tokenizer, and are read from there while the text is that; a directory
appears there whole or not at all. Every source of a run has the run's tokenizer. Needs the extra
`hf` (`datasets`, `tokenizers`) for hubs and tokenizer files, `tiktoken` for its encodings, `fsspec`
for remote files. One process; `nmoe prep` is for more than a few gigabytes.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from loader.errors import ConfigError, PlanError
from loader.files.addresses import is_url
from loader.files.format import MANIFEST_NAME
from loader.files.text_files import TextSource, content_stamp, expand, import_extra, reading
from loader.plan.encoders import Encoder, open_encoder
from loader.plan.settings import RunSettings

SHARD_TOKENS = 2**26
_VERSION = 1


def tokenised(source: TextSource, name: str, run: RunSettings) -> Path:
    """The directory of a source's shards, with `train/` and, of files for validation, `valid/`.

    Args:
        source: Where the text is.
        name: Name of the source.
        run: The run's settings; `tokenizer`, if set, is what manifests call the tokenizer.

    Raises:
        ConfigError: `cache_dir`, the tokenizer or its EOS id is missing, or a package is.
        PlanError: A file is missing, the source has no text, or it changed meanwhile
            (E-PLAN-SOURCE).
    """
    cache_dir = run.cache_dir
    if cache_dir is None:
        raise ConfigError(
            "cache_dir is missing", where=f"source {name!r}", do="set cache_dir for its tokens"
        )
    tokenizer = open_encoder(run.tokenizer_path or run.tokenizer, run, name)
    made_by = [tokenizer.name, tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eos_token_id]
    stamp = content_stamp(source)
    if source.repo and not Path(source.repo).is_dir():
        source = replace(source, revision=stamp[0][1])  # the commit, wherever the branch goes
    identity = json.dumps([_VERSION, source.spec, source.valid_urls, stamp, *made_by])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    target = cache_dir / f"{re.sub('[^A-Za-z0-9._-]', '_', name)}-{digest}"
    if target.is_dir():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".tokenising-", dir=cache_dir))
    try:
        _write_split(aside / "train", name, tokenizer, _texts(source, source.urls))
        if source.valid_urls:
            _write_split(aside / "valid", name, tokenizer, _texts(source, source.valid_urls))
        if content_stamp(source) != stamp:
            raise PlanError(
                "text changed while it was tokenised", where=source.spec, code="E-PLAN-SOURCE"
            )
        try:
            os.rename(aside, target)
        except OSError:
            if not target.is_dir():  # else another process was first, with the same tokens
                raise
        _sync(cache_dir)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _texts(source: TextSource, urls: tuple[str, ...]) -> Iterator[str]:
    rows = (_file_rows(url) for url in expand(urls)) if urls else iter([_hub_rows(source)])
    for row in itertools.chain.from_iterable(rows):
        text = row if isinstance(row, str) else row.get(source.text_key)
        if text is not None and not isinstance(text, str):
            raise PlanError(
                f"{source.text_key} is no text",
                where=source.spec,
                found=type(text).__name__,
                code="E-PLAN-SOURCE",
            )
        if text:
            yield text


def _hub_rows(source: TextSource) -> Iterator[dict[str, Any]]:
    datasets = import_extra("datasets", "hf", source.spec)
    directory = Path(source.repo)
    saved = any((directory / n).exists() for n in ("dataset_info.json", "dataset_dict.json"))
    with reading(source.spec, "dataset cannot be read"):
        if saved:
            found = datasets.load_from_disk(str(directory))
            rows = found[source.split] if isinstance(found, dict) else found
        else:
            rows = datasets.load_dataset(
                source.repo,
                source.config or None,
                split=source.split,
                revision=source.revision or None,
            )
        if source.text_key not in rows.column_names:
            raise KeyError(f"no column {source.text_key!r}, only {', '.join(rows.column_names)}")
        yield from rows


def _file_rows(url: str) -> Iterator[str | dict[str, Any]]:
    name = url.removesuffix(".gz")
    with reading(url, "file cannot be read"), _open(url) as file:
        if not name.endswith((".jsonl", ".json")):
            yield file.read().decode("utf-8", "replace")
            return
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                found = str(error)
                row = None
            else:
                found = type(row).__name__
            if not isinstance(row, dict):
                raise PlanError(
                    "not a JSON object",
                    where=f"{url}:{number}",
                    found=found,
                    code="E-PLAN-SOURCE",
                )
            yield row


def _open(url: str) -> IO[bytes]:
    path = url.removeprefix("file://")
    if is_url(path):
        return import_extra("fsspec", "remote", url).open(path, "rb", compression="infer").open()
    return cast(IO[bytes], gzip.open(path, "rb")) if path.endswith(".gz") else open(path, "rb")


def _write_split(directory: Path, name: str, tokenizer: Encoder, texts: Iterator[str]) -> None:
    directory.mkdir(parents=True)
    shards: list[dict[str, Any]] = []
    tokens, ends = array("I"), array("Q")
    for text in texts:
        ids = tokenizer.encode(text)
        if tokenizer.eos_token_id in ids:
            raise PlanError(
                "the EOS token stands inside a document",
                where=f"source {name!r}",
                found=text[:80],
                code="E-PLAN-SOURCE",
            )
        tokens.extend(ids)
        tokens.append(tokenizer.eos_token_id)
        ends.append(len(tokens))
        if len(tokens) >= SHARD_TOKENS:
            shards.append(_write_shard(directory, len(shards), tokens, ends))
            tokens, ends = array("I"), array("Q")
    if ends or not shards:
        if not ends:
            raise PlanError("no text", where=f"source {name!r}", code="E-PLAN-SOURCE")
        shards.append(_write_shard(directory, len(shards), tokens, ends))
    manifest = {
        "dataset": name,
        "version": f"v{_VERSION}",
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eos_token_id": tokenizer.eos_token_id,
        "dtype": "uint32",
        "total_tokens": sum(shard["num_tokens"] for shard in shards),
        "total_documents": sum(shard["num_documents"] for shard in shards),
        "num_shards": len(shards),
        "shards": shards,
    }
    if tokenizer.fingerprint is not None:
        manifest["tokenizer_fingerprint"] = tokenizer.fingerprint
    _write(directory / MANIFEST_NAME, json.dumps(manifest, indent=2).encode())
    _sync(directory)


def _write_shard(directory: Path, i: int, tokens: array[int], ends: array[int]) -> dict[str, Any]:
    path = directory / f"shard-{i:06d}.npy"
    with open(path, "wb") as file:
        np.save(file, np.frombuffer(tokens, np.uint32).astype("<u4", copy=False))
        file.flush()
        os.fsync(file.fileno())
    stops = np.frombuffer(ends, np.uint64)
    spans = np.stack([np.concatenate([[0], stops[:-1]]), stops], axis=1).astype("<u8")
    head = b"NMOEIDX\0" + np.array([1, len(stops), 0], "<u8").tobytes()
    _write(path.with_suffix(".idx"), head + spans.tobytes())
    with open(path, "rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "path": path.name,
        "index_path": path.with_suffix(".idx").name,
        "num_tokens": len(tokens),
        "num_documents": len(ends),
        "checksum": checksum,
    }


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
