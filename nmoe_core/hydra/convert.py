"""Brings head weights of the first published form (`hydra_probe.pt`, `hydra_judge.pt`) in.

The pickle is read with torch's weights-only reader, which runs no code of the file. What a pickle
does not say has to be told: the backbone its head was trained on, how many tokens of a document it
saw, and how many attention heads its judge has. Its labels stay unknown, and the header says so.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmoe_core.engine.config import tap_layers
from nmoe_core.errors import HeadError
from nmoe_core.hydra.features import Backbone
from nmoe_core.hydra.head_files import JUDGE_NAME, PROBE_NAME, save_head
from nmoe_core.hydra.heads import JudgeArch, ProbeArch, build_head

UNKNOWN = "unknown"


def import_pickle(
    path: Path, heads_dir: Path, model: Backbone, max_ctx: int, num_heads: int = 8
) -> Path:
    """Write the head of a pickle as `heads_dir/hydra_{probe,judge}.safetensors`; return its path.

    Args:
        path: The `.pt` file: a dictionary of tensors.
        heads_dir: Where the head file goes.
        model: The backbone that the head was trained on.
        max_ctx: Tokens of a document that it saw in training.
        num_heads: Attention heads of a judge, which its tensors do not tell.

    Raises:
        HeadError: Missing (E-HEAD-MISSING), or not tensors of a probe or judge for this backbone
            (E-HEAD-FORMAT).
    """
    tensors = _read_tensors(path)
    try:
        arch = _arch_of(tensors, num_heads)
        head = build_head(arch)
        head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    except (KeyError, ValueError, RuntimeError, AssertionError) as error:
        raise _not_a_head(path, " ".join(str(error).split())[:200]) from None
    if arch.hidden_size != model.config.hidden_size:
        raise _not_a_head(path, f"hidden size {arch.hidden_size}", f"{model.config.hidden_size}")
    target = heads_dir / (PROBE_NAME if isinstance(arch, ProbeArch) else JUDGE_NAME)
    tap = tap_layers(model.config.num_hidden_layers)[isinstance(arch, JudgeArch)]
    save_head(target, head, {"tap": tap, **_header(path, model, max_ctx)})
    return target


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise HeadError("head is missing", where=path, code="E-HEAD-MISSING") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise _not_a_head(path, " ".join(str(error).split())[:200]) from None
    if not isinstance(value, dict) or not all(isinstance(t, Tensor) for t in value.values()):
        raise _not_a_head(path, type(value).__name__)
    return value


def _arch_of(tensors: dict[str, Tensor], num_heads: int) -> ProbeArch | JudgeArch:
    rows, hidden_size = tensors["proj.weight"].shape
    if "q0" not in tensors:
        return ProbeArch(hidden_size, nan_to_num=True)
    ffn_dim = tensors["enc0.linear1.weight"].shape[0]
    return JudgeArch(hidden_size, rows, num_heads, ffn_dim, nan_to_num=True)


def _header(path: Path, model: Backbone, max_ctx: int) -> dict[str, Any]:
    return {
        "max_ctx": max_ctx,
        "backbone": {
            "digest": model.digest,
            "num_hidden_layers": model.config.num_hidden_layers,
            "hidden_size": model.config.hidden_size,
        },
        "labels_digest": UNKNOWN,
        "scorer_model": UNKNOWN,
        "scorer_version": UNKNOWN,
        "rubric_hash": UNKNOWN,
        "imported_from": path.name,
        "metrics": {},
        "fingerprints": {},
    }


def _not_a_head(path: Path, found: str, expected: str = "tensors of a probe or judge") -> HeadError:
    return HeadError(
        "not a head of the first published form",
        where=path,
        found=found,
        expected=expected,
        code="E-HEAD-FORMAT",
    )
