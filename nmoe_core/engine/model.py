"""The gpt-oss transformer: embedding, blocks of attention and experts, logits.

Results are those of the published model computed in the dtype asked for; norms, softmaxes and the
router are float32 always. Matrix products are shaped so that the rounding of a document's rows
does not depend on the rest of the batch: with MKL on x86 its result is the same to the last bit,
elsewhere to float32 rounding. A call of the model computes whole documents and keeps nothing;
`extend` runs new tokens of sequences that a cache keeps, through the same blocks. Blocks can be
run in parts, so that documents a first head has rejected cost nothing further.

`Transformer.from_checkpoint` is where a model gets its blocks: plain ones, or those of
`nmoe_core.engine.kernels` on a device that has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmoe_core.base.errors import ConfigError, TokenizerError
from nmoe_core.base.settings import ExpertChoice
from nmoe_core.engine import backend, memory
from nmoe_core.engine.attention import Attention, Context, PackedDocuments
from nmoe_core.engine.generation.cache import PagedCache
from nmoe_core.engine.generation.step import Chunk, StepBatch
from nmoe_core.engine.moe import MixtureOfExperts
from nmoe_core.engine.packing import MIN_ROWS, Packing, describe, is_whole, linear
from nmoe_core.engine.rope import rotation_table
from nmoe_core.engine.weights.checkpoint import LayerTensors, checkpoint_digest, open_checkpoint
from nmoe_core.engine.weights.config import ModelConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32; the result has the dtype of x."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class Block(nn.Module):
    """One block: attention and experts, each on the normalised residual and added to it."""

    def __init__(self, config: ModelConfig, layer: int, tensors: LayerTensors) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(tensors.attn_norm, config.rms_norm_eps)
        self.attn = Attention(config, layer, tensors)
        self.mlp_norm = RMSNorm(tensors.mlp_norm, config.rms_norm_eps)
        self.mlp = MixtureOfExperts(config, tensors)

    def forward(self, x: Tensor, context: Context, rotation: Tensor) -> Tensor:
        """Residual [N, hidden] before the block to the one after it."""
        x = x + self.attn(self.attn_norm(x), context, rotation)
        return x + self.mlp(self.mlp_norm(x), min_rows=context.min_rows)


class Transformer(nn.Module):
    """A loaded model.

    Attributes:
        config: Its shape.
        digest: Name of its weights, as `checkpoint_digest` gives it.
        tokens_processed: Real tokens that went through the first block of a call, over all calls.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: Sequence[Block],
        embedding: Tensor,
        final_norm: Tensor,
        unembedding: Tensor,
        digest: str,
    ) -> None:
        super().__init__()
        self.config = config
        self.digest = digest
        self.tokens_processed = 0
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.blocks = nn.ModuleList(blocks)
        self.norm = RMSNorm(final_norm, config.rms_norm_eps)
        self.unembedding = nn.Parameter(unembedding, requires_grad=False)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        config: ModelConfig | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        experts: ExpertChoice = "auto",
        use_kernels: bool | None = None,
    ) -> Transformer:
        """Load a checkpoint, expert by expert.

        Args:
            path: Directory of the checkpoint, or the one above its `original/`.
            config: Stands in for the checkpoint's own.
            device: Where the weights lie and the work is done.
            dtype: torch.float32 or torch.bfloat16.
            experts: "packed" keeps MXFP4 experts as they are stored and decodes what a batch needs:
                the same numbers in a third of the memory of bfloat16, for more time. "decoded"
                decodes them once. "auto" keeps them packed on a GPU and decodes them on a CPU.
            use_kernels: None for wherever the device has them (`backend.has_kernels`).

        Raises:
            CheckpointError: As `open_checkpoint`.
            ConfigError: Another dtype (E-CONFIG-DTYPE); a device that is not here
                (E-CONFIG-DEVICE) or whose memory is too small (E-CONFIG-MEMORY); experts that are
                not MXFP4 cannot stay packed (E-CONFIG-EXPERTS).
        """
        if dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                "the engine does not compute in this dtype",
                found=dtype,
                expected="torch.float32 or torch.bfloat16",
                code="E-CONFIG-DTYPE",
            )
        device = backend.usable_device(device)
        with open_checkpoint(path, config, device) as checkpoint:
            config, form = checkpoint.config, checkpoint.expert_form(experts)
            memory.check_fits(checkpoint, dtype, form)
            # The tables first: what is read of a mapping counts, and they are the largest tensors.
            tables = checkpoint.embedding(dtype), checkpoint.unembedding(dtype)
            blocks = [
                Block(config, layer, checkpoint.layer(layer, dtype, form))
                for layer in range(config.num_hidden_layers)
            ]
            final_norm = checkpoint.final_norm()
        model = cls(config, blocks, tables[0], final_norm, tables[1], checkpoint_digest(path))
        if use_kernels is None:
            use_kernels = backend.has_kernels(device)
        if not use_kernels:
            return model
        from nmoe_core.engine.kernels.block import with_kernels

        return with_kernels(model)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor | None,
        lengths: Tensor | None = None,
        *,
        return_hidden_states: Sequence[int] = (),
        up_to_layer: int | None = None,
        no_logits: bool = False,
        from_layer: int = 0,
        hidden: Tensor | None = None,
    ) -> Tensor | tuple[Tensor | None, dict[int, Tensor]]:
        """Run documents through the blocks.

        Args:
            input_ids: int64 or int32 [B, T], right-padded; ids past a document's end are not read.
                Not used, and may be None, with `hidden`.
            lengths: int64 or int32 [B], tokens of each document; None when all have T.
            return_hidden_states: Numbers n of blocks, from 1, whose residual is asked for: the
                stream after block n, before the final norm.
            up_to_layer: Number of the last block to run. Default: all, or the last one asked for
                when no logits are.
            no_logits: Leave out the final norm and the unembedding.
            from_layer: Blocks already run; `hidden` is then the residual after block `from_layer`.
            hidden: [B, T, hidden_size], as an earlier call returned it.

        Returns:
            float32 logits [B, T, vocab]; with `return_hidden_states`, the pair of logits (None if
            not wanted) and {n: residual [B, T, hidden_size] in the model's dtype}. Zero where
            padded. The tensors may be used under autograd.

        Raises:
            ConfigError: Arguments do not fit each other or the model (E-CONFIG-FORWARD).
            TokenizerError: An id is outside the vocabulary (E-TOKENIZER-VOCAB).
        """
        taps = tuple(return_hidden_states)
        last = self._last_block(taps, up_to_layer, no_logits, from_layer)
        x, packing = self._start(input_ids, lengths, from_layer, hidden)
        context = self.documents(packing)
        rotation = rotation_table(self.config, packing.length, x.device)[packing.positions]
        self.tokens_processed += packing.num_tokens
        states: dict[int, Tensor] = {}
        for number, block in enumerate(self.blocks[from_layer:last], from_layer + 1):
            x = block(x, context, rotation)
            if number in taps:
                states[number] = packing.unpack_ordinary(x)
        logits = None if no_logits else packing.unpack_ordinary(self._logits(x))
        return (logits, states) if taps or logits is None else logits

    def documents(self, packing: Packing) -> Context:
        """Context of whole documents, on the model's device."""
        return PackedDocuments(self.config, packing)

    def step(
        self, cache: PagedCache, chunks: Sequence[Chunk], batch_invariant: bool = False
    ) -> Context:
        """Context of new tokens of sequences that `cache` keeps, on the model's device."""
        return StepBatch(cache, chunks, batch_invariant)

    @torch.inference_mode()
    def extend(
        self, input_ids: Tensor, context: Context, rotation: Tensor, wanted: Tensor
    ) -> Tensor:
        """Run new tokens of sequences that a cache keeps.

        Args:
            input_ids: int64 [N], within the vocabulary.
            context: What the rows are, see `step`.
            rotation: complex64 [N, head_dim / 2], of the rows' positions.
            wanted: int64 [M], rows whose logits are asked for.

        Returns:
            float32 [M, vocab].
        """
        self.tokens_processed += len(input_ids)
        x = F.embedding(input_ids, self.embedding)
        for block in self.blocks:
            x = block(x, context, rotation)
        return self._logits(x[wanted], context.min_rows)

    def _logits(self, x: Tensor, min_rows: int = MIN_ROWS) -> Tensor:
        return linear(self.norm(x), self.unembedding, min_rows=min_rows).float()

    def _last_block(
        self, taps: tuple[int, ...], up_to_layer: int | None, no_logits: bool, from_layer: int
    ) -> int:
        """Number of the last block to run; refuses arguments that contradict each other."""
        depth = self.config.num_hidden_layers
        last = max(taps) if taps and no_logits else depth
        last = last if up_to_layer is None else up_to_layer
        if not 0 <= from_layer < last <= depth:
            raise _refused(f"blocks {from_layer + 1} to {last}", f"within 1 to {depth}")
        if outside := [n for n in taps if not from_layer < n <= last]:
            raise _refused(f"hidden state {outside[0]}", f"one of {from_layer + 1} to {last}")
        if no_logits and not taps:
            raise _refused("no_logits and no hidden state", "at least one result asked for")
        if not no_logits and last < depth:
            raise _refused(f"logits after block {last}", f"no_logits, or all {depth} blocks")
        return last

    def _start(
        self,
        input_ids: Tensor | None,
        lengths: Tensor | None,
        from_layer: int,
        hidden: Tensor | None,
    ) -> tuple[Tensor, Packing]:
        """The packed residual before the first block to run."""
        if (from_layer > 0) != (hidden is not None):
            raise _refused(f"from_layer {from_layer}", "with hidden, and hidden only with it")
        batch = self._checked_ids(input_ids) if hidden is None else self._checked_hidden(hidden)
        if batch.shape[1] > self.config.max_position_embeddings:
            limit = self.config.max_position_embeddings
            raise _refused(f"{batch.shape[1]} positions", f"at most {limit}")
        device = self.embedding.device
        packing = Packing.of(batch.shape[0], batch.shape[1], lengths, device)
        rows = packing.pack(batch.to(device))
        if hidden is not None:
            return rows, packing
        self._check_vocabulary(rows)
        return F.embedding(rows, self.embedding), packing

    def _checked_ids(self, input_ids: Tensor | None) -> Tensor:
        if input_ids is None or not is_whole(input_ids) or input_ids.ndim != 2:
            raise _refused(describe(input_ids), "input_ids int64 or int32 [B, T]")
        if not input_ids.numel():
            raise _refused(f"input_ids {describe(input_ids)}", "at least one document and token")
        return input_ids.long()

    def _checked_hidden(self, hidden: Tensor) -> Tensor:
        size, dtype = self.config.hidden_size, self.embedding.dtype
        is_tensor = isinstance(hidden, Tensor) and hidden.dtype == dtype
        if not is_tensor or hidden.ndim != 3 or hidden.shape[2] != size:
            raise _refused(f"hidden {describe(hidden)}", f"{dtype} [B, T, {size}]")
        return hidden

    def _check_vocabulary(self, ids: Tensor) -> None:
        low, high = (int(bound) for bound in ids.aminmax()) if len(ids) else (0, 0)
        if low < 0 or high >= self.config.vocab_size:
            raise TokenizerError(
                "a token id is outside the backbone's vocabulary",
                found=low if low < 0 else high,
                expected=f"0 to {self.config.vocab_size - 1}",
                do="use the tokenizer the backbone was trained with",
                code="E-TOKENIZER-VOCAB",
            )


def _refused(found: str, expected: str) -> ConfigError:
    return ConfigError(
        "the forward call cannot be made",
        found=found,
        expected=expected,
        code="E-CONFIG-FORWARD",
    )
