"""A training that goes on where a kill left it: weights, optimiser, generators, step and losses.

The state is a safetensors file beside the head, committed at most once a minute and deleted with
the head's commit. A state of other inputs or settings is not used. On a CPU the head of a training
that was killed any number of times is the head of one that was not, byte for byte.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from loader.files.sealed import content_hash, sealed
from nmoe_core.base.atomic import write_bytes
from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.heads.files import tensors_digest

SAVE_INTERVAL_S = 60.0
_STATE = ("step", "exp_avg", "exp_avg_sq")


@dataclass
class TrainingState:
    """Where and how often the state of one training is kept.

    Args:
        path: The state's file.
        fingerprints: What the training is made from; a file of others is ignored.
        interval_s: Seconds between two saves.
        clock: Seconds that never run back.
    """

    path: Path
    fingerprints: Fingerprints
    interval_s: float = SAVE_INTERVAL_S
    clock: Callable[[], float] = time.monotonic
    _saved_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._saved_at = self.clock()

    def save(self, head: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> None:
        """Commit the state after `len(losses)` steps, unless the last save is younger."""
        if self.clock() - self._saved_at < self.interval_s:
            return
        tensors = {f"head.{name}": value for name, value in head.state_dict().items()}
        for i, parameter in enumerate(head.parameters()):
            state = optimizer.state[parameter]
            tensors |= {f"optimizer.{i}.{name}": state[name] for name in _STATE if name in state}
        tensors["generator"] = torch.get_rng_state()
        if _device(head).type == "cuda":
            tensors["generator_cuda"] = torch.cuda.get_rng_state(_device(head))
        stored = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        made = {"fingerprints": self.fingerprints, "losses": losses}
        header = json.dumps(sealed(made | {"tensors_sha256": tensors_digest(stored)}))
        write_bytes(self.path, save(stored, metadata={"state": header}))
        self._saved_at = self.clock()

    def restore(self, head: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        """Set head, optimiser and generators to the saved state; return the losses so far."""
        found = self._read()
        if found is None:
            return []
        tensors, losses = found
        head.load_state_dict(
            {name[5:]: value for name, value in tensors.items() if name.startswith("head.")}
        )
        for i, parameter in enumerate(head.parameters()):
            names = [name for name in _STATE if f"optimizer.{i}.{name}" in tensors]
            state = {name: tensors[f"optimizer.{i}.{name}"] for name in names}
            optimizer.state[parameter] = {
                name: value if name == "step" else value.to(parameter.device)
                for name, value in state.items()
            }
        torch.set_rng_state(tensors["generator"])
        if "generator_cuda" in tensors:
            torch.cuda.set_rng_state(tensors["generator_cuda"], _device(head))
        return losses

    def clear(self) -> None:
        """Delete the file: the head is committed."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> tuple[dict[str, Tensor], list[float]] | None:
        """None when there is no file, or it belongs to another training."""
        try:
            with safe_open(str(self.path), framework="pt") as file:
                header = json.loads((file.metadata() or {})["state"])
                if header["fingerprints"] != self.fingerprints:
                    return None
                tensors = {name: file.get_tensor(name) for name in list(file.keys())}
            # One that was damaged is not gone on from: the training starts over.
            is_whole = header["content_hash"] == content_hash(header)
            if not is_whole or header["tensors_sha256"] != tensors_digest(tensors):
                return None
            return tensors, header["losses"]
        except (FileNotFoundError, SafetensorError, KeyError, TypeError, ValueError):
            return None


def _device(head: nn.Module) -> torch.device:
    return next(head.parameters()).device
