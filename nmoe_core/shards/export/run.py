"""Writes the documents of a manifest in another trainer's format, unless the export is up to
date."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from loader.files.addresses import local_path
from loader.files.checksummed_json import check_seal
from loader.files.format import Manifest, check_digest, load_manifest, read_json_object
from nmoe_core.base.atomic import TMP_MARK, replace_dir, replacing, write_json
from nmoe_core.base.errors import ConfigError, FormatError
from nmoe_core.base.fingerprint import (
    Fingerprints,
    is_current,
    recorded,
    seal_summary,
    sha256_file,
    sha256_json,
)
from nmoe_core.base.result import Result
from nmoe_core.shards.documents import ingest_ids, open_entry, require_undamaged
from nmoe_core.shards.export import mds, raw
from nmoe_core.shards.inspect import open_tokenizer
from nmoe_core.shards.manifest import COLUMNS_NAME, column_files, documents_digest

EXPORT_CODE = "export/2"
SUMMARY_NAME = "export.json"
Form = Literal["megatron", "olmo", "mds", "llmc", "parquet"]
_VOCABULARY = ("dtype", "tokenizer", "vocab_size", "eos_token_id")
_MAX_INT32 = 2**31 - 1


def export(
    manifest_path: Path,
    output: Path,
    form: Form,
    seq_len: int | None = None,
    tokenizer: str | None = None,
) -> Result:
    """Write all documents of a manifest to a directory. Passthrough columns are written to
    `columns.parquet` there, with one row per document in the same order.

    Args:
        manifest_path: `manifest.json` of a split or a shard, in the data tree or the curated tree.
        output: Directory for this export alone.
        form: Format of the export.
        seq_len: For `mds`: tokens per sample; a shorter last sample is dropped. If None, samples
            are documents.
        tokenizer: For `parquet`: the tokenizer of the shards, if it is a file.

    Returns:
        The digest of the files' names and checksums; `files`, `documents`, `tokens`,
        `tokens_left_out`, and whether the export was `changed`.

    Raises:
        ConfigError: `seq_len` does not fit the format, is below 1, or exceeds the number of tokens.
        FormatError: The shards differ from the manifest, or were replaced during the export
            (E-EXPORT-CHANGED); or the directory has other files or another export
            (E-EXPORT-OUTPUT).
        LockedError: Another process is writing to the directory.
    """
    if seq_len is not None and (form != "mds" or seq_len < 1):
        raise ConfigError(
            "seq_len needs format mds and must be at least 1",
            found=f"{form} with {seq_len}",
            do="omit seq_len; other trainers cut windows themselves",
        )
    output = local_path(output).resolve()
    manifest = load_manifest(manifest_path)
    if manifest.vocab_size > _MAX_INT32:
        raise FormatError(
            "token ids do not fit int32",
            where=manifest.path,
            found=manifest.vocab_size,
            expected=f"at most {_MAX_INT32}",
            code="E-EXPORT-OUTPUT",
        )
    left_out = manifest.total_tokens % seq_len if seq_len else 0
    counts = {
        "documents": manifest.total_documents,
        "tokens": manifest.total_tokens - left_out,
        "tokens_left_out": left_out,
    }
    if not counts["tokens"]:
        found = f"{manifest.total_tokens} tokens"
        raise ConfigError("the export would have no sample", where=manifest.path, found=found)
    made_from = {
        "code": EXPORT_CODE,
        "data": documents_digest(manifest),
        "settings": sha256_json([form, seq_len]),
    }
    columns = column_files(manifest)
    if columns:
        made_from["columns"] = sha256_json(list(columns.values()))
    if form == "parquet":
        from nmoe_core.shards.export.text import files_beside

        made_from["beside"] = sha256_json(files_beside(manifest))
    with replacing(output):
        _refuse_other(output, made_from)
        summary = output / SUMMARY_NAME
        names = read_json_object(summary)["files"] if is_current(summary, made_from) else {}
        if names and not damaged_files(output):
            return _result(names, counts, changed=False)
        staged = output.with_name(f".{output.name}{TMP_MARK}new")
        staged.mkdir()
        try:
            files = {
                path.name: sha256_file(path)
                for path in _write(form, staged, manifest, seq_len, tokenizer)
            }
            if columns and form != "parquet":
                from nmoe_core.shards.columns import copy_columns

                ids = (ingest_id for ingest_id, _ in ingest_ids(manifest))
                copy_columns(manifest, ids, staged / COLUMNS_NAME)
                files[COLUMNS_NAME] = sha256_file(staged / COLUMNS_NAME)
            value = {
                "format": form,
                "manifest": str(manifest.path),
                "content_hash_of_manifest": manifest.content_digest(),
                **{f"num_{name}": count for name, count in counts.items()},
                "num_samples": counts["tokens"] // seq_len if seq_len else counts["documents"],
                **{name: getattr(manifest, name) for name in _VOCABULARY},
                "tokenizer_fingerprint": manifest.extra.get("tokenizer_fingerprint"),
                "bos_token_id": manifest.extra.get("bos_token_id"),
                "files": files,
                "fingerprints": made_from,
            }
            write_json(staged / SUMMARY_NAME, seal_summary(value))
            _refuse_changed(manifest, made_from)
            replace_dir(staged, output)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
    return _result(files, counts, changed=True)


def damaged_files(output: Path) -> list[FormatError]:
    """An error for each file of an export that is missing or differs from `export.json`. Raises
    FormatError if `export.json` is missing, or was edited (E-EXPORT-CHANGED)."""
    summary = output / SUMMARY_NAME
    value = read_json_object(summary)
    check_seal(value, summary, required=True, code="E-EXPORT-CHANGED", error=FormatError)
    found = []
    for name, checksum in value["files"].items():
        try:
            check_digest(output / name, checksum, "E-EXPORT-CHANGED")
        except FormatError as error:
            found.append(error)
    return found


def _refuse_changed(manifest: Manifest, made_from: Fingerprints) -> None:
    """Raise FormatError if the shards were replaced during the export, which may then mix two
    versions."""
    found = documents_digest(load_manifest(manifest.path))
    if found != made_from["data"]:
        raise FormatError(
            "the shards were replaced while they were exported",
            where=manifest.path,
            found=f"content {found}",
            expected=made_from["data"],
            do="export them again",
            code="E-EXPORT-CHANGED",
        )


def _result(files: dict[str, str], counts: dict[str, int], *, changed: bool) -> Result:
    return Result(sha256_json(files), {"files": list(files), **counts, "changed": changed})


def _write(
    form: Form, output: Path, manifest: Manifest, seq_len: int | None, tokenizer: str | None
) -> Iterator[Path]:
    require_undamaged(manifest)
    # Shards are written in the order in which the loader reads them.
    files = (open_entry(manifest.path.parent, manifest, entry) for entry in manifest.shards)
    match form:
        case "megatron":
            return raw.write_megatron(output, manifest.dataset, files)
        case "olmo":
            return raw.write_olmo(output, manifest.dataset, files)
        case "mds":
            return mds.write(output, files, seq_len)
        case "llmc":
            return raw.write_llmc(output, manifest.dataset, files)
        case "parquet":
            from nmoe_core.shards.export.text import write_texts

            opened = open_tokenizer(manifest.tokenizer, tokenizer)
            return write_texts(output, manifest, files, opened)


def _refuse_other(output: Path, made_from: Fingerprints) -> None:
    """Raise FormatError if the directory contains anything except an earlier export in the same
    format."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    found = recorded(output / SUMMARY_NAME) or {}
    if found.get("settings") != made_from["settings"]:
        raise FormatError(
            "the output directory is not empty",
            where=output,
            found="another export" if found else "other files",
            expected="no files, or an earlier export with the same settings",
            do="choose another directory, or delete this one",
            code="E-EXPORT-OUTPUT",
        )
