"""A small decoder over bytes: its training on one arm, and its loss on documents.

The vocabulary is the 256 bytes and a separator before each document, so bits per byte can be
compared between tokenizers. Each byte of an arm is read once. Uses one thread, so equal seeds give
equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from nmoe_core.quality.heads.scores import one_thread

CONTEXT = 256
BATCH = 8
SEPARATOR = 256
_WIDTH = 96
_HEADS = 4
_LAYERS = 3
_RATE = 3e-3
_WARMUP = 0.05


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(_WIDTH)
        self.norm2 = nn.RMSNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, time, width]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Next-byte model with about 0.4 million weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(257, _WIDTH)
        self.place = nn.Embedding(CONTEXT, _WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(_LAYERS)))
        self.norm = nn.RMSNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, 257, bias=False)

    def losses(self, windows: torch.Tensor) -> torch.Tensor:
        """Loss in nats of each byte after the first: `[batch, time]` of int64 `[batch, time + 1]`;
        0 for padding; a target below 0 means padding."""
        inputs = windows[:, :-1].clamp_min(0)
        targets = windows[:, 1:]
        x = self.embed(inputs) + self.place.weight[: inputs.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        flat = F.cross_entropy(
            logits.flatten(0, 1), targets.reshape(-1), reduction="none", ignore_index=-1
        )
        return flat.view(targets.shape)


def windows_of(texts: Sequence[bytes]) -> np.ndarray:
    """Concatenated texts with a separator before each, as int16 `[windows, CONTEXT + 1]`; an
    incomplete last window is dropped."""
    parts = [part for text in texts for part in ([SEPARATOR], np.frombuffer(text, np.uint8))]
    stream = np.concatenate([np.empty(0, np.int16), *parts]).astype(np.int16)
    count = max(len(stream) - 1, 0) // CONTEXT
    starts = np.arange(count)[:, None] * CONTEXT
    return stream[starts + np.arange(CONTEXT + 1)]


def train(windows: np.ndarray, seed: int, step_done: Callable[[], None]) -> Decoder:
    """Train a decoder for one epoch of complete batches. Initialisation and order depend only on
    the seed and the number of windows, so the results of the arms can be compared in pairs."""
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Decoder()
        order = np.random.default_rng(seed).permutation(len(windows))
        steps = len(windows) // BATCH
        optimizer = torch.optim.AdamW(model.parameters(), _RATE, betas=(0.9, 0.95))
        for step in range(steps):
            done = (step + 0.5) / steps
            scale = min(done / _WARMUP, 1.0) * (1 - 0.9 * done)
            for group in optimizer.param_groups:
                group["lr"] = _RATE * scale
            rows = windows[order[step * BATCH : (step + 1) * BATCH]]
            loss = model.losses(torch.from_numpy(rows.astype(np.int64))).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step_done()
    return model


@torch.no_grad()
def document_bits(model: Decoder, texts: Sequence[bytes]) -> np.ndarray:
    """Bits per text under the model: float64 `[N]`."""
    rows = []
    owners = []
    for i, text in enumerate(texts):
        stream = np.concatenate([[SEPARATOR], np.frombuffer(text, np.uint8)])
        for start in range(0, len(text), CONTEXT):
            row = np.full(CONTEXT + 1, -1, np.int64)
            part = stream[start : start + CONTEXT + 1]
            row[: len(part)] = part
            rows.append(row)
            owners.append(i)
    bits = np.zeros(len(texts))
    with one_thread():
        for start in range(0, len(rows), 32):
            batch = torch.from_numpy(np.stack(rows[start : start + 32]))
            found = model.losses(batch).double().sum(1).numpy() / np.log(2)
            np.add.at(bits, owners[start : start + 32], found)
    return bits
