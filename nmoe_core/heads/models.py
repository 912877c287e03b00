"""The two heads: a linear probe on pooled states, and a small transformer judge on all states.

Both normalise their input inside the module, by a LayerNorm without parameters; both compute in
float32. Outputs are not clamped here. Parameter names are those of the first published heads.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmoe_core.base.errors import HeadError
from nmoe_core.engine import Transformer, tap_layers
from nmoe_core.heads.features import pooled, position_mask
from nmoe_core.labels.scores import QUALITY

DROPOUT = 0.1
OLD_INFINITY = 1e4
_SWITCHES = ("nan_to_num", "is_normalised", "has_second_pass")


@dataclass(frozen=True, slots=True)
class ProbeArch:
    """Shape of a probe.

    `nan_to_num` marks one of the first published form, see `layer_norm`; one of the second form
    reads pooled states that are not normalised.
    """

    hidden_size: int
    nan_to_num: bool = False
    is_normalised: bool = True
    num_scores: int = len(QUALITY)


@dataclass(frozen=True, slots=True)
class JudgeArch:
    """Shape of a judge: width of its encoder, attention heads, feed-forward width.

    `nan_to_num` marks one of the published forms, see `layer_norm`. Without a second pass, as in
    the second form, a judge can grade but cannot be trained.
    """

    hidden_size: int
    mid_dim: int = 512
    num_heads: int = 8
    ffn_dim: int = 2048
    nan_to_num: bool = False
    has_second_pass: bool = True
    num_scores: int = len(QUALITY)


class Probe(nn.Module):
    """Scores from the mean state of a document: LayerNorm, then one linear map."""

    kind = "probe"

    def __init__(self, arch: ProbeArch) -> None:
        super().__init__()
        self.arch = arch
        self.proj = nn.Linear(arch.hidden_size, arch.num_scores)

    def forward(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        """Scores `[B, D]` from states `[B, T, H]` of documents of `lengths` `[B]`."""
        return self.from_pooled(pooled(hidden, lengths))

    def from_pooled(self, features: Tensor) -> Tensor:
        """Scores `[B, D]` from pooled states `[B, H]`."""
        if not self.arch.is_normalised:
            return self.proj(features.float())
        return self.proj(layer_norm(features, self.arch.nan_to_num))


class Judge(nn.Module):
    """Scores from all states of a document, read at a learned query token.

    The query token and the normalised states are projected to `mid_dim` and run through one
    encoder layer; a linear head reads the query's position. In training a second pass adds the
    oracle's own scores to that position and predicts them again through a second layer and the
    same head; grading never runs it.
    """

    kind = "judge"

    def __init__(self, arch: JudgeArch) -> None:
        super().__init__()
        self.arch = arch
        self.q0 = nn.Parameter(torch.randn(arch.hidden_size))
        self.proj = nn.Linear(arch.hidden_size, arch.mid_dim)
        self.enc0 = _encoder_layer(arch)
        if arch.has_second_pass:
            self.enc1 = _encoder_layer(arch)
        self.shared_head = nn.Linear(arch.mid_dim, arch.num_scores)
        if arch.has_second_pass:
            mid = arch.mid_dim
            self.score_embed = nn.Sequential(
                nn.Linear(arch.num_scores, mid), nn.ReLU(), nn.Linear(mid, mid)
            )

    def forward(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        """Scores `[B, D]` from states `[B, T, H]` of documents of `lengths` `[B]`."""
        tokens, is_padding = self._tokens(hidden, lengths)
        return self.shared_head(_at_query(self.enc0, tokens, is_padding))

    def forward_with_teacher(
        self, hidden: Tensor, lengths: Tensor, teacher: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores of both passes, `[B, D]` each, for training.

        Only the second pass sees the `teacher`: the oracle's scores `[B, D]`, as shares in 0..1.
        """
        tokens, is_padding = self._tokens(hidden, lengths)
        encoded = self.enc0(tokens, src_key_padding_mask=is_padding)
        hint = self.score_embed(teacher)
        told = torch.cat([encoded[:, :1] + hint[:, None], encoded[:, 1:]], dim=1)
        again = _at_query(self.enc1, told, is_padding)
        return self.shared_head(encoded[:, 0]), self.shared_head(again)

    def _tokens(self, hidden: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encoder input `[B, 1 + T, mid]`, the query token first, and where it is padding."""
        mask = position_mask(lengths, hidden.shape[1])
        # Padding may hold anything, NaN included, and attention multiplies masked values by zero.
        states = layer_norm(hidden.float(), self.arch.nan_to_num)
        states = torch.where(mask[:, :, None], states, 0.0)
        query = self.q0.expand(len(states), 1, -1)
        tokens = self.proj(torch.cat([query, states], dim=1))
        return tokens, F.pad(~mask, (1, 0), value=False)


def layer_norm(states: Tensor, nan_to_num: bool = False) -> Tensor:
    """LayerNorm of states `[..., H]` over the last dimension, in float32, without parameters.

    `nan_to_num` first puts 0 for NaN and +-1e4 for infinities, as the published heads do. Grading
    has counted those and failed the document before any head runs.
    """
    states = states.float()
    if nan_to_num:
        states = torch.nan_to_num(states, nan=0.0, posinf=OLD_INFINITY, neginf=-OLD_INFINITY)
    return F.layer_norm(states, states.shape[-1:])


def _encoder_layer(arch: JudgeArch) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(
        arch.mid_dim, arch.num_heads, arch.ffn_dim, dropout=DROPOUT, batch_first=True
    )
    # Dropout on attention weights would make torch hold all T x T of them for every head.
    layer.self_attn.dropout = 0.0
    return layer


def _at_query(layer: nn.TransformerEncoderLayer, tokens: Tensor, is_padding: Tensor) -> Tensor:
    """The layer's output at the first position alone, `[B, mid]`: T times less work than all."""
    query = tokens[:, :1]
    attended, _ = layer.self_attn(
        query, tokens, tokens, key_padding_mask=is_padding, need_weights=False
    )
    x = layer.norm1(query + layer.dropout1(attended))
    widened = layer.dropout(F.relu(layer.linear1(x)))
    return layer.norm2(x + layer.dropout2(layer.linear2(widened)))[:, 0]


def arch_to_dict(arch: ProbeArch | JudgeArch) -> dict[str, Any]:
    """A shape as files name it; five scores are not named, as in older ones."""
    fields = asdict(arch)
    if arch.num_scores == len(QUALITY):
        del fields["num_scores"]
    return fields


def arch_from_dict(value: Any) -> ProbeArch | JudgeArch:
    """The shape that a header names.

    Raises:
        TypeError: It is no table, or fields are missing, unknown or of another type.
        ValueError: The kind is neither probe nor judge, or a size no head can have.
    """
    if not isinstance(value, dict):
        raise TypeError(f"the shape is a {type(value).__name__}")
    fields = dict(value)
    match kind := fields.pop("kind", None):
        case "probe":
            arch = ProbeArch(**fields)
        case "judge":
            arch = JudgeArch(**fields)
        case _:
            raise ValueError(f"unknown kind of head {kind!r}")
    for key, item in asdict(arch).items():
        if type(item) is not (bool if key in _SWITCHES else int):
            raise TypeError(f"{key} is {item!r}")
        if item < 1 and key not in _SWITCHES:
            raise ValueError(f"{key} is {item}")
    return arch


def head_of(arch: ProbeArch | JudgeArch, tensors: Mapping[str, Tensor]) -> Probe | Judge:
    """A head with these weights, as float32. No memory is taken for a shape that is not theirs.
    Raises ValueError: there is no head of that shape, or these are not its weights."""
    try:
        with torch.device("meta"):
            head = Probe(arch) if isinstance(arch, ProbeArch) else Judge(arch)
        weights = {name: tensor.float() for name, tensor in tensors.items()}
        head.load_state_dict(weights, assign=True)
    except (ArithmeticError, AttributeError, AssertionError, RuntimeError, TypeError) as error:
        raise ValueError(str(error)) from None
    return head


def tap_of(kind: str, model: Transformer, tap: Any = None, where: Path | None = None) -> int:
    """Number of the block that a head reads; by default the usual one of its kind. Raises
    HeadError: the backbone has no such block (E-HEAD-FORMAT)."""
    depth = model.config.num_hidden_layers
    if tap is None:
        return tap_layers(depth)[kind == "judge"]
    if type(tap) is not int or not 1 <= tap <= depth:
        raise HeadError(
            "the backbone has no such block to read",
            where=where,
            found=f"tap {tap!r}"[:80],
            expected=f"1 to {depth}",
            code="E-HEAD-FORMAT",
        )
    return tap
