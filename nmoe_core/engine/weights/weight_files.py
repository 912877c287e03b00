"""Finds the files of a checkpoint, and reads tensors from them without loading whole files.

Files are memory-mapped. Pages that were read count as memory of the process, so mappings are closed
after every 8 MB. A tensor is a view of its mapping and must be copied before the next read. A
single expert is read by its index in the stack. Pickles are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from loader.files.addresses import as_path
from loader.files.format import read_json_object
from loader.files.regular import regular
from nmoe_core.base.errors import CheckpointError, FormatError
from nmoe_core.base.fingerprint import local_digest, sha256_json
from nmoe_core.engine.weights.config import ModelConfig
from nmoe_core.engine.weights.fields import token_ids
from nmoe_core.engine.weights.layout import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
INDEX_SUFFIX = ".safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
MAPPED_BYTES = 1 << 23
# Files that transformers loads instead of the files of an index, or in addition to them.
_OWN_WEIGHTS = ("model.safetensors", "adapter_model.safetensors")


class WeightFiles:
    """Several safetensors files, opened as one collection of tensors.

    `specs` has the shape and type of every tensor, from the headers. Raises CheckpointError if a
    file cannot be read (E-CHECKPOINT-FILE), or two files have the same tensor
    (E-CHECKPOINT-TENSOR).
    """

    def __init__(self, paths: list[Path]) -> None:
        self.specs: dict[str, TensorSpec] = {}
        self._paths: dict[str, Path] = {}
        self._handles: dict[Path, Any] = {}
        self._mapped_bytes = 0
        for path in paths:
            handle = self._handle(path)
            for name in handle.keys():  # noqa: SIM118 (the handle is not a dict)
                if name in self._paths:
                    raise CheckpointError(
                        f"{name} is stored twice", where=path, code="E-CHECKPOINT-TENSOR"
                    )
                header = handle.get_slice(name)
                self._paths[name] = path
                self.specs[name] = TensorSpec(tuple(header.get_shape()), (header.get_dtype(),))

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """A stored tensor, or its slice `expert`, as a view of the file: copy it immediately."""
        handle = self._handle(self._paths[name])
        tensor = handle.get_tensor(name) if expert is None else handle.get_slice(name)[expert]
        self._mapped_bytes += tensor.nbytes
        return tensor

    def close(self) -> None:
        """Close the mappings; a later read opens its file again."""
        self._handles.clear()
        self._mapped_bytes = 0

    def _handle(self, path: Path) -> Any:
        if self._mapped_bytes > MAPPED_BYTES:
            self.close()
        if path not in self._handles:
            try:
                self._handles[path] = safe_open(regular(path), framework="pt", device="cpu")
            except SafetensorError as error:
                raise _bad_file(path, str(error), "a complete safetensors file") from None
        return self._handles[path]


def weight_files(place: Path) -> list[Path]:
    """The safetensors files that the index names; without an index, all safetensors files in the
    directory, sorted by name.

    Raises CheckpointError if the index is invalid or weights are not in the index
    (E-CHECKPOINT-FILE), or if the index names pickles (E-CHECKPOINT-PICKLE) or a missing file
    (E-CHECKPOINT-MISSING).
    """
    indexes = sorted(place.glob(f"*{INDEX_SUFFIX}"))
    if not indexes:
        return sorted(place.glob("*.safetensors"))
    names = read_checkpoint_json(indexes[0]).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise _bad_file(indexes[0], "no weight_map", "an object of tensor names and file names")
    files = sorted({str(name) for name in names.values()})
    for name in files:
        if Path(name).suffix in PICKLE_SUFFIXES:
            raise pickle_refused(place / name)
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise _bad_file(indexes[0], repr(name), "safetensors file names without directories")
        if not (place / name).is_file():
            raise CheckpointError(
                f"the index names {name}, which does not exist",
                where=place,
                do="download the checkpoint again",
                code="E-CHECKPOINT-MISSING",
            )
    others = {path.name for path in indexes[1:]}
    others |= {name for name in _OWN_WEIGHTS if name not in files and (place / name).is_file()}
    if others:
        found = f"{', '.join(sorted(others))} beside it"
        expected = "the weights of one model"
        raise _bad_file(indexes[0], found, expected, "move the files of the other model away")
    return [place / name for name in files]


def find_checkpoint(path: str | Path) -> Path:
    """The directory at `path`, `path/original` or `path/original/original` that is a checkpoint.

    Raises CheckpointError if there is no checkpoint (E-CHECKPOINT-MISSING), or only pickles
    (E-CHECKPOINT-PICKLE).
    """
    root = as_path(path)
    if root.suffix in PICKLE_SUFFIXES and not root.is_dir():
        raise pickle_refused(root)
    places = [root, root / "original", root / "original" / "original"]
    for place in places:
        if (place / CONFIG_NAME).is_file() and any(place.glob("*.safetensors*")):
            return place
    for place in places:
        for file in sorted(place.glob("*")):
            if file.suffix in PICKLE_SUFFIXES:
                raise pickle_refused(file)
    is_gguf = root.suffix == ".gguf" or any(root.glob("*.gguf"))
    raise CheckpointError(
        "no checkpoint at this path",
        where=root,
        found="GGUF, which the engine does not read" if is_gguf else None,
        expected=f"{CONFIG_NAME} and *.safetensors in it, in original/ or in original/original/",
        do="give the directory with these files, or convert a GGUF file: nmoe fetch FILE.gguf DIR",
        code="E-CHECKPOINT-MISSING",
    )


def checkpoint_files(path: str | Path) -> list[Path]:
    """The files of a checkpoint; raises as `checkpoint_digest`."""
    place = find_checkpoint(path)
    return [place / CONFIG_NAME, *weight_files(place)]


def checkpoint_digest(path: str | Path) -> str:
    """Digest of the weights: SHA-256 of the names and SHA-256 of the config and all weight files.

    Each process reads a file once, unless the file changes. Raises as `find_checkpoint`, or if the
    index names a missing file.
    """
    files = checkpoint_files(path)
    return sha256_json({file.name: local_digest(file) for file in files})


def read_config(path: str | Path) -> ModelConfig:
    """The sizes of a checkpoint's model; raises as `find_checkpoint`, `ModelConfig.from_dict`."""
    place = find_checkpoint(path)
    raw = read_checkpoint_json(place / CONFIG_NAME)
    try:
        return ModelConfig.from_dict(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{place}/{error}", code=error.code) from None


def end_ids(path: str | Path, config: ModelConfig) -> list[int]:
    """Token ids that end a completion: `eos_token_id` of `generation_config.json`, else of
    `config.json`, else of `config`. Raises CheckpointError as `open_checkpoint`."""
    place = find_checkpoint(path)
    for name in (GENERATION_NAME, CONFIG_NAME):
        if (place / name).is_file():
            found = token_ids(read_checkpoint_json(place / name), "eos_token_id")
            if found:
                return found
    return [] if config.eos_token_id is None else [config.eos_token_id]


def read_checkpoint_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint. Raises CheckpointError for other content
    (E-CHECKPOINT-FILE)."""
    try:
        return read_json_object(path)
    except FormatError as error:
        raise CheckpointError(str(error), code="E-CHECKPOINT-FILE") from None


def pickle_refused(path: Path) -> CheckpointError:
    """The error for weights in a format that can run code."""
    return CheckpointError(
        "pickled weights are refused, since opening them can run code",
        where=path,
        expected="safetensors",
        do="download the safetensors files of the checkpoint",
        code="E-CHECKPOINT-PICKLE",
    )


def _bad_file(
    path: Path, found: str, expected: str, do: str = "download it again"
) -> CheckpointError:
    return CheckpointError(
        "invalid checkpoint file",
        where=path,
        found=found,
        expected=expected,
        do=do,
        code="E-CHECKPOINT-FILE",
    )
