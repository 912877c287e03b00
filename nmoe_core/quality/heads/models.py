"""The two heads: a linear probe on pooled states, and a small transformer judge on all states.

Both normalise their input by a LayerNorm without parameters and compute in float32. They do not
clamp their outputs. Parameters are named as in the first published heads.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmoe_core.quality.heads.features import pooled, position_mask
from nmoe_core.quality.heads.shapes import JudgeArch, ProbeArch

DROPOUT = 0.1
OLD_INFINITY = 1e4


class Probe(nn.Module):
    """Scores from the mean states of a document after one block or several: LayerNorm, unless the
    weights standardise the states, then one linear map."""

    kind = "probe"

    def __init__(self, arch: ProbeArch) -> None:
        super().__init__()
        self.arch = arch
        self.proj = nn.Linear(arch.hidden_size, arch.num_scores)

    def forward(self, states: Sequence[Tensor], lengths: Tensor) -> Tensor:
        """Scores `[B, D]` from the states `[B, T, H]` after each block, of documents of `lengths`
        `[B]`."""
        return self.from_pooled(torch.cat([pooled(hidden, lengths) for hidden in states], dim=1))

    def from_pooled(self, features: Tensor) -> Tensor:
        """Scores `[B, D]` from the pooled states of all blocks side by side, `[B, blocks * H]`."""
        if not self.arch.is_normalised:
            return self.proj(features.float())
        return self.proj(layer_norm(features, self.arch.nan_to_num))


class Judge(nn.Module):
    """Scores from all states of a document, read at the position of a learned query token.

    The query token and the normalised states are projected to `mid_dim` and run through one encoder
    layer; a linear head reads the query's position. In training, a second pass adds the oracle's
    scores to the query's position and predicts them again through a second layer and the same head.
    Grading never runs the second pass.
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

        Only the second pass uses `teacher`: the oracle's scores `[B, D]`, scaled to 0..1.
        """
        tokens, is_padding = self._tokens(hidden, lengths)
        encoded = self.enc0(tokens, src_key_padding_mask=is_padding)
        hint = self.score_embed(teacher)
        told = torch.cat([encoded[:, :1] + hint[:, None], encoded[:, 1:]], dim=1)
        again = _at_query(self.enc1, told, is_padding)
        return self.shared_head(encoded[:, 0]), self.shared_head(again)

    def _tokens(self, hidden: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encoder input `[B, 1 + T, mid]`, with the query token first, and the mask of its
        padding."""
        mask = position_mask(lengths, hidden.shape[1])
        # Zero the padding: it may hold NaN, and attention multiplies masked values by zero.
        states = layer_norm(hidden.float(), self.arch.nan_to_num)
        states = torch.where(mask[:, :, None], states, 0.0)
        query = self.q0.expand(len(states), 1, -1)
        tokens = self.proj(torch.cat([query, states], dim=1))
        return tokens, F.pad(~mask, (1, 0), value=False)


def layer_norm(states: Tensor, nan_to_num: bool = False) -> Tensor:
    """LayerNorm of states `[..., H]` over the last dimension, in float32, without parameters.

    `nan_to_num` first replaces NaN by 0 and infinities by +-1e4, as the published heads do. Grading
    fails a document with NaN or infinite states before any head runs.
    """
    states = states.float()
    if nan_to_num:
        states = torch.nan_to_num(states, nan=0.0, posinf=OLD_INFINITY, neginf=-OLD_INFINITY)
    return F.layer_norm(states, states.shape[-1:])


def _encoder_layer(arch: JudgeArch) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(
        arch.mid_dim, arch.num_heads, arch.ffn_dim, dropout=DROPOUT, batch_first=True
    )
    # With dropout on attention weights, torch would hold a T x T matrix of weights for every
    # attention head.
    layer.self_attn.dropout = 0.0
    return layer


def _at_query(layer: nn.TransformerEncoderLayer, tokens: Tensor, is_padding: Tensor) -> Tensor:
    """The layer's output at the first position only, `[B, mid]`: T times less work than at all
    positions."""
    query = tokens[:, :1]
    attended, _ = layer.self_attn(
        query, tokens, tokens, key_padding_mask=is_padding, need_weights=False
    )
    x = layer.norm1(query + layer.dropout1(attended))
    widened = layer.dropout(F.relu(layer.linear1(x)))
    return layer.norm2(x + layer.dropout2(layer.linear2(widened)))[:, 0]


def head_of(arch: ProbeArch | JudgeArch, tensors: Mapping[str, Tensor]) -> Probe | Judge:
    """Make a head with these weights, in float32. Shapes are checked before memory is allocated.
    Raises ValueError if no head can have the shape `arch`, or if the weights do not have this
    shape."""
    try:
        with torch.device("meta"):
            head = Probe(arch) if isinstance(arch, ProbeArch) else Judge(arch)
        weights = {name: tensor.float() for name, tensor in tensors.items()}
        head.load_state_dict(weights, assign=True)
    except (ArithmeticError, AttributeError, AssertionError, RuntimeError, TypeError) as error:
        raise ValueError(str(error)) from None
    return head
