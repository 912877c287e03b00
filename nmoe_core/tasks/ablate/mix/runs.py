"""Trains one small decoder per mixture and seed, and measures it on every target.

Each finished run is a file of its own, named by what it was made from: a command that is killed, or
repeated with more runs, trains only what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loader.files.format import read_json_object
from nmoe_core.base.atomic import write_json
from nmoe_core.base.compute.api import map_shards
from nmoe_core.base.compute.tables import ComputeTable
from nmoe_core.base.errors import CurationError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.base.progress import Meter
from nmoe_core.tasks.ablate.mix.texts import Domain
from nmoe_core.tasks.ablate.model import BATCH, CONTEXT, windows_of

CODE = "mix/1"
_MIN_STEPS = 20
_SURE_PART = 0.9  # of the bytes that a draw has if its documents are like all of its source


class Run(NamedTuple):
    """One decoder to train. shares: float64 `[sources]`."""

    shares: np.ndarray
    num_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class _Work:
    """What a worker trains on: int16 `[windows, CONTEXT + 1]`."""

    windows: np.ndarray
    seed: int


class Bench:
    """Trains decoders on mixtures of the same texts, for the same targets.

    Args:
        domains: The sources.
        targets: Held-out texts of each target by name.
        compute: Where decoders are trained; the losses do not depend on it.
        directory: Directory of the files of finished runs.
    """

    def __init__(
        self,
        domains: Sequence[Domain],
        targets: Mapping[str, Sequence[bytes]],
        compute: ComputeTable,
        directory: Path,
    ) -> None:
        self.domains = domains
        self.targets = targets
        self._compute = compute
        self._directory = directory
        self._of_targets = sha256_json({name: _digest(texts) for name, texts in targets.items()})

    def bits(self, runs: Sequence[Run], what: str) -> list[dict[str, np.ndarray]]:
        """Bits of each text of each target, for every run: float64 `[texts]` by target. Runs of the
        same number of tokens read the same number of bytes. Raises CurationError if these are too
        few to train on (E-MIX-TEXT)."""
        drawn = [self._windows(run) for run in runs]
        steps = [self._steps(run, len(windows)) for run, windows in zip(runs, drawn)]
        if min(steps) < _MIN_STEPS:
            times = math.ceil(10 * _MIN_STEPS / max(1, min(steps))) / 10
            raise CurationError(
                "a mixture is too short to train on",
                found=f"{min(steps)} steps of {BATCH * CONTEXT} bytes",
                expected=f"at least {_MIN_STEPS}",
                do=f"set --tokens {times} times as high",
                code="E-MIX-TEXT",
            )
        work = [
            _Work(windows[: count * BATCH], run.seed)
            for windows, run, count in zip(drawn, runs, steps)
        ]
        paths = [self._path(one) for one in work]
        missing = [k for k, path in enumerate(paths) if not path.is_file()]
        meter = Meter(what, len(runs), "decoders")
        meter.add(len(runs) - len(missing))
        measure = partial(_measure, dict(self.targets))
        made = map_shards(measure, (work[k] for k in missing), self._compute)
        for k, found in zip(missing, made, strict=True):
            paths[k].parent.mkdir(parents=True, exist_ok=True)
            write_json(paths[k], {"bits": found})
            meter.add()
        return [_read(path) for path in paths]

    def _windows(self, run: Run) -> np.ndarray:
        texts: list[bytes] = []
        for k, (domain, share) in enumerate(zip(self.domains, run.shares.tolist())):
            rng = np.random.default_rng([run.seed, 1, k])
            texts += domain.draw(round(share * run.num_tokens), rng)[0]
        order = np.random.default_rng([run.seed, 2]).permutation(len(texts))
        return windows_of([texts[i] for i in order.tolist()])

    def _steps(self, run: Run, num_windows: int) -> int:
        """Steps of a run. Equal for all mixtures, so that none gains by more bytes per token, and
        known without the other runs, so that more runs do not change the first ones."""
        least = min(sum(map(len, one.pool)) / int(one.lengths.sum()) for one in self.domains)
        shared = int(_SURE_PART * least * run.num_tokens) // (BATCH * CONTEXT)
        return min(shared, num_windows // BATCH)

    def _path(self, work: _Work) -> Path:
        made_from = [CODE, sha256(work.windows.tobytes()).hexdigest(), work.seed, self._of_targets]
        return self._directory / f"{sha256_json(made_from)}.json"


def _measure(targets: Mapping[str, Sequence[bytes]], work: _Work) -> dict[str, list[float]]:
    from nmoe_core.tasks.ablate.model import document_bits, train

    model = train(work.windows, work.seed, lambda: None)
    return {name: document_bits(model, texts).tolist() for name, texts in targets.items()}


def _read(path: Path) -> dict[str, np.ndarray]:
    found: dict[str, Any] = read_json_object(path)["bits"]
    return {name: np.array(bits) for name, bits in found.items()}


def _digest(texts: Sequence[bytes]) -> str:
    return sha256(b"\0".join(texts)).hexdigest()
