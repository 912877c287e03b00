"""The transformer: embedding, blocks of attention and feed-forward, logits.

Results equal the results of the published model in the requested dtype. Norms, softmaxes and the
router always use float32. With MKL on x86, a document's result is bit-identical in any batch;
otherwise it is equal up to rounding. Blocks can be run in parts, so that a document that the first
head drops need not run through all blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmoe_core.base.errors import CheckpointError, ConfigError, TokenizerError
from nmoe_core.base.settings import ExpertChoice
from nmoe_core.engine import backend
from nmoe_core.engine.attention import Context
from nmoe_core.engine.backend import choose_runtime, with_experts
from nmoe_core.engine.block import RMSNorm, Runtime
from nmoe_core.engine.generation.cache import PagedCache
from nmoe_core.engine.generation.step import StepBatch
from nmoe_core.engine.packing import MIN_ROWS, Packing, Residual, describe, is_integer, linear
from nmoe_core.engine.rotation import rotation_table
from nmoe_core.engine.weights.checkpoint import open_checkpoint
from nmoe_core.engine.weights.config import ModelConfig
from nmoe_core.engine.weights.weight_files import checkpoint_digest

LOGIT_ROWS = 512


class Transformer(nn.Module):
    """A loaded model: `blocks` made by `runtime.block`, and `tables` from `Checkpoint.tables`.

    Attributes:
        has_head: Whether the checkpoint has an unembedding. Without one there are no logits.
        tokens_processed: Number of real tokens that entered the first block, over all calls.
        use_graphs: Whether decoding steps are captured as CUDA graphs, if the blocks run on
            kernels.
    """

    def __init__(
        self,
        config: ModelConfig,
        runtime: Runtime,
        blocks: Sequence[nn.Module],
        tables: dict[str, Tensor],
        digest: str,
        has_head: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self.runtime = runtime
        self.digest = digest
        self.has_head = has_head
        self.tokens_processed = 0
        self.embedding = nn.Parameter(tables["embedding"], requires_grad=False)
        self.blocks = nn.ModuleList(blocks)
        self.norm = RMSNorm(tables["final_norm"], config.rms_norm_eps)
        self.unembedding = nn.Parameter(tables["unembedding"], requires_grad=False)
        self.use_graphs = self.embedding.is_cuda
        self._recorder: Any = None

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        config: ModelConfig | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        moe_backend: ExpertChoice = "auto",
        use_kernels: bool | None = None,
    ) -> Transformer:
        """Load a checkpoint, one expert at a time.

        Args:
            path: Directory of the checkpoint, or the parent of its `original/`.
            config: Replaces the checkpoint's configuration.
            device: Device of the weights and of the computation.
            dtype: torch.float32 or torch.bfloat16.
            moe_backend: "packed" keeps MXFP4 experts as stored and decodes the experts that a batch
                needs: the same numbers in a third of the memory of bfloat16, for more time.
                "decoded" decodes them once. "auto" keeps them packed on a GPU and decodes them on a
                CPU. "grouped" decodes them once and multiplies with torch's grouped matmul
                (`grouped.py`).
                "hub" keeps them packed and multiplies with triton_kernels (`hub.py`).
                "int8" rounds the matrices of dense blocks to int8 (`int8.py`).
            use_kernels: Whether to run on kernels; None uses kernels if the device supports them
                (`backend.has_kernels`).

        Raises:
            CheckpointError: As `open_checkpoint`; the kernels cannot take a scale of packed experts
                (E-CHECKPOINT-SCALE).
            ConfigError: Another dtype (E-CONFIG-DTYPE); a device that is not here
                (E-CONFIG-DEVICE) or whose memory is too small (E-CONFIG-MEMORY); experts that are
                not MXFP4 cannot stay packed, and "grouped", "hub" and "int8" do not compute every
                model everywhere (E-CONFIG-EXPERTS); a package is missing (E-CONFIG-EXTRA);
                `use_kernels` for a family without kernels (E-CONFIG-KERNELS).
        """
        if dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                "the engine does not support this dtype",
                found=dtype,
                expected="torch.float32 or torch.bfloat16",
                code="E-CONFIG-DTYPE",
            )
        device = backend.usable_device(device)
        with open_checkpoint(path, config, device) as checkpoint:
            config = checkpoint.config
            form = checkpoint.expert_form(moe_backend)
            backend.check_fits(checkpoint, dtype, form)
            runtime = choose_runtime(config, device, use_kernels)
            runtime = with_experts(
                runtime, moe_backend, config, device, dtype, checkpoint.is_packed
            )
            # Read the tables first: pages that are read from a mapping count as memory, and the
            # tables are the largest tensors.
            tables = checkpoint.tables(dtype)
            # Read blocks one by one, so that the stored form of only one block is in memory.
            blocks = [
                runtime.block(config, layer, checkpoint.layer(layer, dtype, form), runtime.experts)
                for layer in range(config.num_hidden_layers)
            ]
            has_head = checkpoint.layout.has_head
        return cls(config, runtime, blocks, tables, checkpoint_digest(path), has_head)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor | Residual,
        lengths: Tensor | None = None,
        *,
        return_hidden_states: Sequence[int] = (),
        up_to_layer: int | None = None,
        no_logits: bool = False,
    ) -> Tensor | tuple[Tensor | None, dict[int, Tensor]]:
        """Run documents through the blocks.

        Args:
            input_ids: int64 or int32 [B, T], right-padded; ids past a document's end are not read.
                Or the residual of an earlier call, from which the next blocks continue.
            lengths: int64 or int32 [B], number of tokens of each document; None if all documents
                have T tokens.
            return_hidden_states: Numbers n of blocks, from 1, whose residual is returned: the
                residual stream after block n, before the final norm.
            up_to_layer: Number of the last block to run. Default: all, or without logits the last
                one whose residual is returned.
            no_logits: Do not run the final norm and the unembedding.

        Returns:
            float32 logits [B, T, vocab]; with `return_hidden_states`, the pair of logits (None if
            not wanted) and {n: residual [B, T, hidden_size] in the model's dtype}. Padding is zero.
                The tensors may be used under autograd.

        Raises:
            ConfigError: Arguments do not fit each other or the model (E-CONFIG-FORWARD).
            TokenizerError: An id is outside the vocabulary (E-TOKENIZER-VOCAB).
            CheckpointError: Logits of a base model without a head (E-CHECKPOINT-HEAD).
        """
        if not no_logits:
            self._require_head()
        taps = tuple(return_hidden_states)
        done = input_ids.layer if isinstance(input_ids, Residual) else 0
        last = self._last_block(taps, up_to_layer, no_logits, done)
        x, packing = self._start(input_ids, lengths)
        context = self.runtime.documents(self.config, packing)
        rotation = rotation_table(self.config, packing.length, x.device)[packing.positions]
        self.tokens_processed += len(packing.positions)
        states: dict[int, Tensor] = {}
        for number, block in enumerate(self.blocks[done:last], done + 1):
            x = block(x, context, rotation)
            if number in taps:
                states[number] = packing.unpack_ordinary(x)
        logits = None
        if not no_logits:
            # Tensors made outside inference mode need not be copied for autograd.
            with torch.inference_mode(False), torch.no_grad():
                logits = packing.unpack_ordinary(self._logits(x))
        return (logits, states) if taps or logits is None else logits

    @torch.inference_mode()
    def log_probs(self, input_ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Log-probability of each token after the tokens before it: float32 [B, T], zero for the
        first token and for padding.

        Takes `input_ids` and `lengths` as `forward` does, and raises its errors. Logits of at most
        `LOGIT_ROWS` positions are in memory at once.
        """
        self._require_head()
        depth = self.config.num_hidden_layers
        _, states = self(input_ids, lengths, return_hidden_states=(depth,), no_logits=True)
        x = states[depth]
        packing = Packing.of(x.shape[0], x.shape[1], lengths, x.device)
        rows = packing.pack(x)
        ids = packing.pack(input_ids.long().to(x.device))
        found = rows.new_zeros(len(rows), dtype=torch.float32)
        for first in range(0, len(rows) - 1, LOGIT_ROWS):
            following = ids[first + 1 : first + 1 + LOGIT_ROWS]
            logits = self._logits(rows[first : first + len(following)])
            chosen = logits.gather(1, following[:, None]).squeeze(1)
            found[first + 1 : first + 1 + len(following)] = chosen - logits.logsumexp(dim=1)
        found[packing.positions == 0] = 0
        return packing.unpack(found)

    @torch.inference_mode()
    def extend(
        self, input_ids: Tensor, context: StepBatch, rotation: Tensor, wanted: Tensor
    ) -> Tensor:
        """Run new tokens of cached sequences; returns float32 logits [M, vocab].

        Args:
            input_ids: int64 [N], within the vocabulary.
            context: Context of the rows, made by `runtime.step`.
            rotation: complex64 [N, head_dim / 2], of the rows' positions.
            wanted: int64 [M], rows whose logits are returned.
        """
        self._require_head()
        self.tokens_processed += len(input_ids)
        recorder = self._recorder_of(context.cache)
        if recorder is not None and recorder.takes(context):
            return recorder.run(input_ids, context)[wanted]
        return self._logits(self._through(input_ids, context, rotation)[wanted], context.min_rows)

    def _recorder_of(self, cache: PagedCache) -> Any:
        """The object that captures decoding steps over this cache; None if the runtime has none or
        `use_graphs` is off."""
        if self.runtime.record is None or not self.use_graphs:
            return None
        if self._recorder is None or self._recorder.cache is not cache:
            length = cache.max_pages * cache.page_size
            table = rotation_table(self.config, length, self.embedding.device)
            self._recorder = self.runtime.record(
                lambda *rows: self._logits(self._through(*rows)), table, cache
            )
        return self._recorder

    def _through(self, input_ids: Tensor, context: Context, rotation: Tensor) -> Tensor:
        """[N, hidden]: the residual after all blocks."""
        x = F.embedding(input_ids, self.embedding)
        for block in self.blocks:
            x = block(x, context, rotation)
        return x

    def _require_head(self) -> None:
        if not self.has_head:
            raise CheckpointError(
                "logits of a base model without a head",
                do="ask for hidden states with no_logits, or load the causal language model",
                code="E-CHECKPOINT-HEAD",
            )

    def _logits(self, x: Tensor, min_rows: int = MIN_ROWS) -> Tensor:
        return linear(self.norm(x), self.unembedding, min_rows=min_rows).float()

    def _last_block(
        self, taps: tuple[int, ...], up_to_layer: int | None, no_logits: bool, done: int
    ) -> int:
        """Number of the last block to run. Raises ConfigError if arguments contradict each
        other."""
        depth = self.config.num_hidden_layers
        last = max(taps) if taps and no_logits else depth
        last = last if up_to_layer is None else up_to_layer
        if not 0 <= done < last <= depth:
            raise _refused(f"blocks {done + 1} to {last}", f"within 1 to {depth}")
        if outside := [n for n in taps if not done < n <= last]:
            raise _refused(f"hidden state {outside[0]}", f"one of {done + 1} to {last}")
        if no_logits and not taps:
            raise _refused("no_logits and no hidden state", "at least one requested result")
        if not no_logits and last < depth:
            raise _refused(f"logits after block {last}", f"no_logits, or all {depth} blocks")
        return last

    def _start(
        self, input_ids: Tensor | Residual, lengths: Tensor | None
    ) -> tuple[Tensor, Packing]:
        """The packed residual before the first block to run."""
        is_resumed = isinstance(input_ids, Residual)
        if is_resumed:
            batch = self._checked_hidden(input_ids)
        elif not is_integer(input_ids) or input_ids.ndim != 2:
            raise _refused(describe(input_ids), "input_ids int64 or int32 [B, T], or a Residual")
        elif not input_ids.numel():
            raise _refused(f"input_ids {describe(input_ids)}", "at least one document and token")
        else:
            batch = input_ids.long()
        limit = self.config.max_position_embeddings
        if batch.shape[1] > limit:
            raise _refused(f"{batch.shape[1]} positions", f"at most {limit}")
        device = self.embedding.device
        packing = Packing.of(batch.shape[0], batch.shape[1], lengths, device)
        rows = packing.pack(batch.to(device))
        if is_resumed:
            return rows, packing
        if len(rows):
            low, high = (int(bound) for bound in rows.aminmax())
            check_vocabulary(low if low < 0 else high, self.config)
        return F.embedding(rows, self.embedding), packing

    def _checked_hidden(self, residual: Residual) -> Tensor:
        hidden = residual.hidden
        size = self.config.hidden_size
        dtype = self.embedding.dtype
        if residual.layer < 1:
            raise _refused(f"a residual after block {residual.layer}", "a block from 1 on")
        is_tensor = isinstance(hidden, Tensor) and hidden.dtype == dtype
        if not is_tensor or hidden.ndim != 3 or hidden.shape[2] != size:
            raise _refused(f"hidden {describe(hidden)}", f"{dtype} [B, T, {size}]")
        return hidden


def check_vocabulary(token: int, config: ModelConfig) -> None:
    """Raise TokenizerError if an id is outside the vocabulary (E-TOKENIZER-VOCAB)."""
    if not 0 <= token < config.vocab_size:
        raise TokenizerError(
            "a token id is outside the model's vocabulary",
            found=token,
            expected=f"0 to {config.vocab_size - 1}",
            do="use the model's own tokenizer",
            code="E-TOKENIZER-VOCAB",
        )


def _refused(found: str, expected: str) -> ConfigError:
    return ConfigError(
        "invalid arguments of the forward call",
        found=found,
        expected=expected,
        code="E-CONFIG-FORWARD",
    )
