"""Opens a checkpoint on disk and reads it tensor by tensor, directly to its device.

A checkpoint is a directory with `config.json` and safetensors files. Headers are compared with the
config before any weight is read. Weights are copied from memory-mapped files, experts one by one,
so that peak memory is the model plus one expert and 8 MB. Pickles (`.bin`, `.pt`) can run code when
opened, so they are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from nmoe_core.base.errors import CheckpointError, ConfigError
from nmoe_core.base.settings import ExpertChoice
from nmoe_core.engine.weights.config import GROUP_SIZE, ModelConfig
from nmoe_core.engine.weights.layout import (
    EXPERT_PARTS,
    HUGGING_FACE,
    Layout,
    check_tensors,
    detect_layout,
    part_shapes,
)
from nmoe_core.engine.weights.mxfp4 import (
    NAN_SCALE,
    DecodedExperts,
    ExpertForm,
    Experts,
    PackedExperts,
    decode_into,
)
from nmoe_core.engine.weights.weight_files import (
    WeightFiles,
    find_checkpoint,
    read_config,
    weight_files,
)

# Small or sensitive parts are always computed in float32.
FLOAT32_PARTS = (
    *("attn_norm", "q_norm", "k_norm", "sinks", "mlp_norm", "router_weight", "router_bias"),
)


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The weights of one block; matrices are [.., outputs, inputs].

    Sizes: E experts, H hidden, I intermediate, D head dimension, N query heads, Q + 2K the width of
    the fused query, key and value. Rows of `gate_up`: first the I gates, then the I ups. A part is
    None if the block does not have it.
    """

    attn_norm: Tensor  # [H] float32
    qkv_weight: Tensor  # [Q + 2K, H]
    out_weight: Tensor  # [H, Q]
    mlp_norm: Tensor  # [H] float32
    gate_up: Experts  # [E, 2I, H]
    down: Experts  # [E, H, I]
    qkv_bias: Tensor | None = None  # [Q + 2K]
    q_norm: Tensor | None = None  # [D] float32
    k_norm: Tensor | None = None  # [D] float32
    sinks: Tensor | None = None  # [N] float32
    out_bias: Tensor | None = None  # [H]
    router_weight: Tensor | None = None  # [E, H] float32
    router_bias: Tensor | None = None  # [E] float32
    gate_up_bias: Tensor | None = None  # [E, 2I]
    down_bias: Tensor | None = None  # [E, H]


@contextmanager
def open_checkpoint(
    path: str | Path, config: ModelConfig | None = None, device: torch.device | str = "cpu"
) -> Iterator[Checkpoint]:
    """Map the files of a checkpoint and check their headers against its config.

    `config` replaces the configuration in the directory; weights are read to `device`. Raises
    CheckpointError as `find_checkpoint` and `ModelConfig.from_dict`, and if a file cannot be read
    (E-CHECKPOINT-FILE) or tensors do not match the config (E-CHECKPOINT-TENSOR).
    """
    place = find_checkpoint(path)
    config = config or read_config(place)
    files = WeightFiles(weight_files(place))
    layout = detect_layout(config, files.specs, place)
    check_tensors(config, layout, files.specs, place)
    try:
        yield Checkpoint(place, config, layout, files, device)
    finally:
        files.close()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open, checked checkpoint. Every read returns a new copy, never a view of the file."""

    directory: Path
    config: ModelConfig
    layout: Layout
    files: WeightFiles
    device: torch.device | str

    def tables(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors `embedding` and `unembedding` [vocab, hidden] (the same tensor if tied) and
        `final_norm`, float32 [hidden]. If the files have two different tables, as in some
        fine-tunes, both are used, even if the config says that they are tied."""
        embedding = unembedding = self._copy(self.layout.embedding, dtype)
        is_tied = self.config.tie_word_embeddings
        head = HUGGING_FACE.unembedding if is_tied else self.layout.unembedding
        if head in self.files.specs:
            unembedding = self._copy(head, dtype)
            if is_tied and torch.equal(embedding, unembedding):
                unembedding = embedding
        return {
            "embedding": embedding,
            "unembedding": unembedding,
            "final_norm": self._copy(self.layout.final_norm, torch.float32),
        }

    def expert_form(self, choice: ExpertChoice) -> ExpertForm:
        """The form of experts for a backend: "auto" is packed on a GPU if all experts are MXFP4,
        else decoded; "grouped" is decoded, "hub" is packed. Matrices become int8 after decoding."""
        if choice not in get_args(ExpertChoice):
            raise ConfigError(
                "unknown form of experts",
                found=choice,
                expected=", ".join(get_args(ExpertChoice)),
                code="E-CONFIG-EXPERTS",
            )
        is_gpu = torch.device(self.device).type == "cuda"
        auto = choice == "auto" and is_gpu and self.is_packed
        if choice == "int8":
            return "int8"
        return "packed" if auto or choice in ("packed", "hub") else "decoded"

    @property
    def is_packed(self) -> bool:
        """Whether the files have all experts as MXFP4."""
        for layer in range(self.config.num_hidden_layers):
            for part in EXPERT_PARTS:
                if not self.layout.is_packed(layer, part, self.files.specs):
                    return False
        return True

    def layer(
        self, layer: int, dtype: torch.dtype, experts: ExpertForm = "decoded"
    ) -> LayerTensors:
        """Weights of block `layer` (0-based).

        Raises CheckpointError if a scale is NaN (E-CHECKPOINT-TENSOR), and ConfigError if packed
        experts are requested but not in the files (E-CONFIG-EXPERTS).
        """
        parts = {part: self._part(layer, part, dtype) for part in self.layout.parts}
        if "gate_up_bias" in parts:
            bias = parts["gate_up_bias"]
            parts["gate_up_bias"] = torch.cat([bias[:, 0::2], bias[:, 1::2]], dim=1)
        return LayerTensors(
            **parts,
            gate_up=self._experts(layer, "gate_up_weight", dtype, experts),
            down=self._experts(layer, "down_weight", dtype, experts),
        )

    def _copy(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.files.read(name).to(self.device, dtype, copy=True)

    def _part(self, layer: int, part: str, dtype: torch.dtype) -> Tensor:
        kind = torch.float32 if part in FLOAT32_PARTS else dtype
        names = [self.layout.block_name(layer, piece) for piece in self.layout.parts[part]]
        pieces = [self._copy(name, kind) for name in names]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def _experts(self, layer: int, part: str, dtype: torch.dtype, form: ExpertForm) -> Experts:
        shape = part_shapes(self.config)[part]
        stem = self.layout.block_name(layer, self.layout.experts[part][0])
        is_stored_packed = self.layout.is_packed(layer, part, self.files.specs)
        if form == "packed" and not is_stored_packed:
            raise ConfigError(
                "only MXFP4 experts can stay packed",
                where=f"{self.directory} {stem}",
                do="load with moe_backend='decoded'",
                code="E-CONFIG-EXPERTS",
            )
        if form == "packed":
            groups = (*shape[:-1], shape[-1] // GROUP_SIZE)
            scales = torch.empty(groups, dtype=torch.uint8, device=self.device)
            blocks = scales.new_empty(*groups, GROUP_SIZE // 2)
            for expert in range(shape[0]):
                blocks[expert], scales[expert] = self._packed_rows(layer, part, expert)
            return PackedExperts(blocks, scales, dtype)
        weight = torch.empty(shape, dtype=dtype, device=self.device)
        for expert in range(shape[0]):
            if is_stored_packed:
                packed = self._packed_rows(layer, part, expert)
                decode_into(weight[expert], *(rows.to(self.device) for rows in packed))
            elif not self.layout.is_stacked:
                names = self.layout.expert_names(layer, part, [expert])
                for name, rows in zip(names, weight[expert].chunk(len(names)), strict=True):
                    rows.copy_(self.files.read(name))
            else:
                rows = self.files.read(stem, expert)
                rows = rows.mT if self.layout.is_input_major else rows
                weight[expert] = _gates_first(part, rows)
        return DecodedExperts(weight)

    def _packed_rows(self, layer: int, part: str, expert: int) -> tuple[Tensor, Tensor]:
        """Blocks and scales of an MXFP4 expert."""
        blocks_name, scales_name = self.layout.packed_names(layer, part)
        scales = self.files.read(scales_name, expert)
        if bool((scales == NAN_SCALE).any()):
            raise CheckpointError(
                "an MXFP4 scale of 255 makes its weights NaN",
                where=f"{self.directory} {scales_name}",
                code="E-CHECKPOINT-TENSOR",
            )
        blocks = self.files.read(blocks_name, expert)
        return _gates_first(part, blocks), _gates_first(part, scales)


def _gates_first(part: str, rows: Tensor) -> Tensor:
    """Rows of gate and up as two halves; in the files they are interleaved (gate even, up odd)."""
    return torch.cat([rows[0::2], rows[1::2]]) if part == "gate_up_weight" else rows
