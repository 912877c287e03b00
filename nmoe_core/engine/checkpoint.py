"""Opens a gpt-oss checkpoint on disk and reads it tensor by tensor.

A checkpoint is a directory with `config.json` and safetensors files: the given path, its
`original/`, or `original/original/`, the first that has both. Headers are compared with the config
before any weight is read; files are memory-mapped and weights copied out, so that peak memory is
the model plus one expert stack. Pickles (`.bin`, `.pt`) run code when opened and are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loader.format import read_json_object
from nmoe_core.engine import mxfp4
from nmoe_core.engine.config import ModelConfig
from nmoe_core.engine.layout import EXPERT_PARTS, Layout, TensorSpec, check_tensors, detect_layout
from nmoe_core.errors import CheckpointError, FormatError
from nmoe_core.fingerprint import sha256_file, sha256_json

CONFIG_NAME = "config.json"
INDEX_SUFFIX = ".safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
# Small or sensitive parts are computed in float32 whatever the model's dtype.
FLOAT32_PARTS = ("attn_norm", "sinks", "mlp_norm", "router_weight", "router_bias")


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The weights of one block, dequantised; matrices are [.., outputs, inputs].

    E experts, H hidden, I intermediate, N query heads, Q + 2K the fused query, key, value width.
    Rows of gate and up interleave: even rows gate, odd rows up.
    """

    attn_norm: Tensor  # [H] float32
    qkv_weight: Tensor  # [Q + 2K, H]
    qkv_bias: Tensor  # [Q + 2K]
    sinks: Tensor  # [N] float32
    out_weight: Tensor  # [H, Q]
    out_bias: Tensor  # [H]
    mlp_norm: Tensor  # [H] float32
    router_weight: Tensor  # [E, H] float32
    router_bias: Tensor  # [E] float32
    gate_up_weight: Tensor  # [E, 2I, H]
    gate_up_bias: Tensor  # [E, 2I]
    down_weight: Tensor  # [E, H, I]
    down_bias: Tensor  # [E, H]


def find_checkpoint(path: str | Path) -> Path:
    """The directory at `path`, `path/original` or `path/original/original` that is a checkpoint.

    Raises:
        CheckpointError: There is none (E-CHECKPOINT-MISSING), or the weights are pickles
            (E-CHECKPOINT-PICKLE).
    """
    root = Path(path)
    if root.suffix in PICKLE_SUFFIXES and not root.is_dir():
        raise _pickle(root)
    places = [root, root / "original", root / "original" / "original"]
    for place in places:
        if (place / CONFIG_NAME).is_file() and any(place.glob("*.safetensors*")):
            return place
    for place in places:
        for file in sorted(place.glob("*")):
            if file.suffix in PICKLE_SUFFIXES:
                raise _pickle(file)
    raise CheckpointError(
        "no checkpoint here",
        where=root,
        expected=f"{CONFIG_NAME} and *.safetensors in it, in original/ or in original/original/",
        do="name the directory that holds them",
        code="E-CHECKPOINT-MISSING",
    )


def checkpoint_digest(path: str | Path) -> str:
    """Name the weights: SHA-256 over the config's and every weight file's name and SHA-256.

    Reads every byte once; where the checkpoint lies does not matter.

    Raises:
        CheckpointError: As `find_checkpoint`, or the index names a file that is not there.
    """
    place = find_checkpoint(path)
    files = [place / CONFIG_NAME, *_weight_files(place)]
    return sha256_json({file.name: sha256_file(file) for file in files})


def load_embedding_table(path: str | Path) -> np.ndarray:
    """float32 [vocab, hidden]: the token embedding alone; the other weights are not read.

    Raises:
        CheckpointError: As `open_checkpoint`.
    """
    with open_checkpoint(path) as checkpoint:
        return checkpoint.embedding(torch.float32).numpy()


def read_checkpoint_json(path: Path) -> dict[str, Any]:
    """One JSON object of a checkpoint.

    Raises:
        CheckpointError: It is not JSON, or not one object (E-CHECKPOINT-FILE).
    """
    try:
        return read_json_object(path)
    except FormatError as error:
        raise CheckpointError(str(error), code="E-CHECKPOINT-FILE") from None


@contextmanager
def open_checkpoint(path: str | Path, config: ModelConfig | None = None) -> Iterator[Checkpoint]:
    """Map the files of a checkpoint and check their headers against its config.

    Args:
        path: See `find_checkpoint`.
        config: Stands in for the directory's own `config.json`.

    Raises:
        CheckpointError: Also as `find_checkpoint` and `ModelConfig.from_dict`; a file cannot be
            read (E-CHECKPOINT-FILE); tensors are not those of the config (E-CHECKPOINT-TENSOR).
    """
    place = find_checkpoint(path)
    config = config or ModelConfig.from_dict(read_checkpoint_json(place / CONFIG_NAME))
    files: dict[str, Any] = {}
    specs: dict[str, TensorSpec] = {}
    for file in _weight_files(place):
        handle = _map_file(file)
        for name in handle.keys():  # noqa: SIM118 (the handle is no dict)
            if name in files:
                raise CheckpointError(
                    f"{name} is stored twice", where=file, code="E-CHECKPOINT-TENSOR"
                )
            header = handle.get_slice(name)
            files[name] = handle
            specs[name] = TensorSpec(tuple(header.get_shape()), (header.get_dtype(),))
    layout = detect_layout(files, place)
    check_tensors(config, layout, specs, place)
    try:
        yield Checkpoint(place, config, layout, files)
    finally:
        files.clear()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open, checked checkpoint. Every read gives a fresh copy, never a view of the file."""

    directory: Path
    config: ModelConfig
    layout: Layout
    files: dict[str, Any]

    def raw(self, name: str) -> Tensor:
        """A stored tensor as it lies in the file: a view that must not outlive the checkpoint."""
        return self.files[name].get_tensor(name)

    def embedding(self, dtype: torch.dtype) -> Tensor:
        """[vocab, hidden]."""
        return self.raw(self.layout.embedding).to(dtype, copy=True)

    def final_norm(self) -> Tensor:
        """float32 [hidden]."""
        return self.raw(self.layout.final_norm).to(torch.float32, copy=True)

    def unembedding(self, dtype: torch.dtype) -> Tensor:
        """[vocab, hidden]."""
        return self.raw(self.layout.unembedding).to(dtype, copy=True)

    def layer(self, layer: int, dtype: torch.dtype) -> LayerTensors:
        """Weights of block `layer` (0-based), MXFP4 experts decoded.

        Raises:
            CheckpointError: A scale byte stands for NaN (E-CHECKPOINT-TENSOR).
        """
        return LayerTensors(
            **{
                field.name: self._experts(layer, field.name, dtype)
                if field.name in EXPERT_PARTS
                else self._part(layer, field.name, dtype)
                for field in fields(LayerTensors)
            }
        )

    def _part(self, layer: int, part: str, dtype: torch.dtype) -> Tensor:
        names = [self.layout.block_name(layer, piece) for piece in self.layout.parts[part]]
        kind = torch.float32 if part in FLOAT32_PARTS else dtype
        return torch.cat([self.raw(name) for name in names]).to(kind, copy=True)

    def _experts(self, layer: int, part: str, dtype: torch.dtype) -> Tensor:
        if not self.layout.is_packed(layer, part, self.files):
            stack = self.raw(self.layout.block_name(layer, self.layout.experts[part]))
            stack = stack.mT if self.layout.is_input_major else stack
            return stack.to(dtype, copy=True, memory_format=torch.contiguous_format)
        blocks_name, scales_name = self.layout.packed_names(layer, part)
        scales = self.raw(scales_name)
        if bool((scales == mxfp4.NAN_SCALE).any()):
            raise CheckpointError(
                "an MXFP4 scale of 255 makes its weights NaN",
                where=f"{self.directory} {scales_name}",
                code="E-CHECKPOINT-TENSOR",
            )
        return mxfp4.decode(self.raw(blocks_name), scales, dtype)


def _weight_files(place: Path) -> list[Path]:
    """The safetensors files that the index names, or all of the directory, sorted by name."""
    indexes = sorted(place.glob(f"*{INDEX_SUFFIX}"))
    if not indexes:
        return sorted(place.glob("*.safetensors"))
    names = read_checkpoint_json(indexes[0]).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise _bad_file(indexes[0], "no weight_map", "an object of tensor names and file names")
    files = sorted({str(name) for name in names.values()})
    for name in files:
        if Path(name).suffix in PICKLE_SUFFIXES:
            raise _pickle(place / name)
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise _bad_file(indexes[0], repr(name), "safetensors file names without directories")
        if not (place / name).is_file():
            raise CheckpointError(
                f"the index names {name}, which is not there",
                where=place,
                do="fetch the checkpoint again, whole",
                code="E-CHECKPOINT-MISSING",
            )
    return [place / name for name in files]


def _map_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise _bad_file(path, str(error), "a whole safetensors file") from None


def _bad_file(path: Path, found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        "the file cannot be used",
        where=path,
        found=found,
        expected=expected,
        do="fetch it again",
        code="E-CHECKPOINT-FILE",
    )


def _pickle(path: Path) -> CheckpointError:
    return CheckpointError(
        "pickled weights are not opened, since that can run code they carry",
        where=path,
        expected="safetensors",
        do="fetch the safetensors files of the checkpoint",
        code="E-CHECKPOINT-PICKLE",
    )
