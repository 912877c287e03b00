"""Others on the same device and the same weights: transformers, vLLM, and the plain path.

A peer whose packages are not installed is skipped, with the reason as its figure. transformers with
`pip install kernels` runs OpenAI's triton_kernels over MXFP4, and FlashAttention 3 with sinks; both
come from the hub or its cache. vLLM, whose experts on a Hopper GPU are Marlin's, pins a torch:
install it in an environment of its own. It and these two packages were written from documentation
and have not been run; transformers alone has been.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import machine
from benchmarks.gpu.figures import Figure, Sizes, documents
from nmoe_core.engine.model import Transformer


@dataclass(frozen=True, slots=True)
class Setting:
    """How transformers computes: arguments of loading, packages, and whether it keeps MXFP4."""

    arguments: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ("transformers",)
    is_packed: bool = False


_HUB = ("transformers", "kernels", "triton")
_FLASH = {"attn_implementation": "kernels-community/vllm-flash-attn3"}
SETTINGS = {
    "grouped_mm": Setting({"experts_implementation": "grouped_mm"}),
    "eager": Setting({"experts_implementation": "eager"}),
    "triton_kernels": Setting(needs=_HUB, is_packed=True),
    "triton_kernels and FlashAttention 3": Setting(_FLASH, _HUB, is_packed=True),
}


def skipped(*needs: str) -> Figure | None:
    """The figure of a peer whose packages are not all installed."""
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    return {"skipped": f"not installed: {', '.join(missing)}"} if missing else None


def plain(path: Path, ours: Transformer, sizes: Sizes) -> Figure:
    """Scoring by the plain path with decoded experts."""
    device = ours.embedding.device
    ids = documents(ours, sizes)
    tap = ours.config.num_hidden_layers
    call = {"return_hidden_states": (tap,), "no_logits": True}
    mine = _rate(lambda: ours(ids, **call), ids, device, sizes)
    other = Transformer.from_checkpoint(
        path, device=device, dtype=torch.bfloat16, use_kernels=False
    )
    return _beside("scoring", _rate(lambda: other(ids, **call), ids, device, sizes), mine)


def transformers_peer(
    path: Path, setting: Setting, ours: Transformer, decoding: dict[int, float], sizes: Sizes
) -> list[Figure] | Figure:
    """Scoring of one document and decoding.

    Args:
        path: The checkpoint.
        setting: How experts and attention are computed.
        ours: The engine's model of it.
        decoding: The engine's tokens per second by batch size.
        sizes: Of documents and batches.
    """
    if (reason := skipped(*setting.needs)) is not None:
        return reason
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    device = ours.embedding.device
    # One document at a time: it keeps all attention scores.
    ids = documents(ours, sizes)
    call = {"return_hidden_states": (ours.config.num_hidden_layers,), "no_logits": True}
    mine = _rate(lambda: ours(ids, **call), ids, device, sizes)
    placed: Any = {"device_map": {"": device}} if device.type == "cuda" else {}
    peer = transformers.GptOssForCausalLM.from_pretrained(
        path,
        dtype=torch.bfloat16,
        **({"attn_implementation": "eager"} | setting.arguments),
        quantization_config=transformers.Mxfp4Config(dequantize=not setting.is_packed),
        **placed,
    ).eval()
    if setting.is_packed and not any("Mxfp4" in type(part).__name__ for part in peer.modules()):
        return {"skipped": "transformers decoded the experts: it does not take these kernels"}
    one = ids[:1]
    with torch.inference_mode():
        rate = _rate(lambda: peer.model(one, use_cache=False), one, device, sizes)
    found = [_beside("scoring", rate, mine)]
    for batch, own_rate in decoding.items():
        rate = _decoding(peer, batch, device, sizes)
        found.append(_beside(f"decoding, batch {batch}", rate, own_rate))
    return found


def vllm_peer(path: Path, decoding: dict[int, float], sizes: Sizes) -> list[Figure] | Figure:
    """Decoding by vLLM; `decoding` as that of `transformers_peer`."""
    if (reason := skipped("vllm")) is not None:
        return reason
    vllm: Any = importlib.import_module("vllm")
    new = min(16, sizes.new_tokens)
    # Every call has the same prompts: kept beginnings would leave nothing to compute.
    model = vllm.LLM(
        model=str(path),
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=sizes.context + 1 + new,
        gpu_memory_utilization=0.5,
    )

    def seconds(batch: int, num_new: int) -> float:
        ids = torch.randint(0, 1000, (batch, sizes.context), generator=torch.Generator()).tolist()
        options = vllm.SamplingParams(
            max_tokens=num_new, temperature=0.0, ignore_eos=True, detokenize=False
        )
        started = time.perf_counter()
        model.generate([{"prompt_token_ids": row} for row in ids], options, use_tqdm=False)
        return time.perf_counter() - started

    found = []
    for batch, own_rate in decoding.items():
        seconds(batch, 2)
        rate = batch * new / (seconds(batch, 1 + new) - seconds(batch, 1))
        found.append(_beside(f"decoding, batch {batch}", rate, own_rate))
    return found


@torch.inference_mode()
def _decoding(peer: Any, batch: int, device: torch.device, sizes: Sizes) -> float:
    """Tokens a second after the prompts' first, greedy."""
    numbers = torch.Generator().manual_seed(1)
    shape = (batch, sizes.context)
    ids = torch.randint(0, peer.config.vocab_size - 2, shape, generator=numbers).to(device)
    new = min(16, sizes.new_tokens)

    def seconds(num_new: int) -> float:
        machine.synchronize(device)
        started = time.perf_counter()
        peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            pad_token_id=0,
        )
        machine.synchronize(device)
        return time.perf_counter() - started

    seconds(2)
    return batch * new / (seconds(1 + new) - seconds(1))


def _rate(run: Callable[[], object], ids: Tensor, device: torch.device, sizes: Sizes) -> float:
    """Tokens a second."""
    return ids.numel() / machine.seconds(run, device, min(3, sizes.rounds), warm_up=1)


def _beside(name: str, rate: float, ours: float) -> Figure:
    return {"what": name, "tokens_per_s": rate, "ours_over_it": ours / rate}
