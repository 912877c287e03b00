"""One device's part of deep embedding: batches of token ids in, mean hidden states out.

After a batch that ran out of memory, the limit of tokens per pass shrinks to 0.6 of its size; each
pass that fits lets it grow by 1.1. A document that does not fit alone comes back as a row of NaN.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np

SHRINK, GROW = 0.6, 1.1


class DeepEmbedder:
    """A model on a device.

    Args:
        model: Of the engine: called for the residual after its last block; has `norm`.
        device: Where it lies.
    """

    def __init__(self, model: Any, device: str) -> None:
        self._model, self._device = model, device
        self._num_blocks: int = model.config.num_hidden_layers
        self.most_tokens = float("inf")  # of one pass, padding included

    def __call__(self, texts: list[np.ndarray]) -> np.ndarray:
        """Unit rows, zero for empty documents, NaN for ones too long: float32 `[N, hidden]`."""
        rows = np.zeros((len(texts), self._model.config.hidden_size), np.float32)
        waiting = [[i for i, text in enumerate(texts) if len(text)]]
        while waiting:
            part = waiting.pop()
            if not part:
                continue
            size = len(part) * max(len(texts[i]) for i in part)
            if len(part) > 1 and size > self.most_tokens:
                waiting += [part[len(part) // 2 :], part[: len(part) // 2]]
                continue
            try:
                rows[part] = self._forward([texts[i] for i in part])
            except MemoryError:
                self.most_tokens = min(self.most_tokens, size) * SHRINK
                if len(part) == 1:
                    rows[part] = np.nan
                else:
                    waiting += [part[len(part) // 2 :], part[: len(part) // 2]]
            else:
                self.most_tokens *= GROW
        return rows

    def _forward(self, texts: list[np.ndarray]) -> np.ndarray:
        """Normalised means of one pass; MemoryError where it does not fit."""
        import torch

        lengths = torch.tensor([len(text) for text in texts])
        ids = torch.zeros(len(texts), int(lengths.max()), dtype=torch.int64)
        for row, text in zip(ids, texts):
            row[: len(text)] = torch.from_numpy(text)
        try:
            with torch.inference_mode():
                last = self._num_blocks
                ids, lengths = ids.to(self._device), lengths.to(self._device)
                _, states = self._model(
                    ids, lengths=lengths, return_hidden_states=(last,), no_logits=True
                )
                # Padded rows are zero, before the norm and after it.
                total = self._model.norm(states[last]).float().sum(dim=1)
                mean = total / lengths[:, None]
                return torch.nn.functional.normalize(mean, dim=1).cpu().numpy()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise MemoryError from None


def open_embedder(model_dir: str, dtype: str, devices: Any) -> DeepEmbedder:
    """Take a device and load the model onto it, once in a process."""
    import torch

    from nmoe_core.engine import Transformer

    device = devices.get()
    model = Transformer.from_checkpoint(Path(model_dir), device=device, dtype=getattr(torch, dtype))
    return DeepEmbedder(model, device)


def embed_batch(embedder: DeepEmbedder, texts: list[np.ndarray]) -> np.ndarray:
    """Embed one batch."""
    return embedder(texts)


def hand_out(devices: tuple[str, ...]) -> Any:
    """A queue from which each worker takes its device."""
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    for device in devices:
        queue.put(device)
    return queue


def all_devices() -> tuple[str, ...]:
    """Every GPU, else the CPU."""
    import torch

    return tuple(f"cuda:{i}" for i in range(torch.cuda.device_count())) or ("cpu",)


def model_limits(model_dir: Path) -> tuple[int, int]:
    """Width of a row, and tokens of the longest document the model takes; reads no weight."""
    from nmoe_core.engine.weights.checkpoint import open_checkpoint

    with open_checkpoint(model_dir) as checkpoint:
        config = checkpoint.config
        return config.hidden_size, config.max_position_embeddings
