"""`python -m benchmarks.gpu --out figures.json`: every GPU figure in one JSON file.

Makes a checkpoint of the shape asked for with random weights (gpt-oss-120b: in memory alone, as it
is packed), loads it as any caller does, and measures: prefill as scoring does it (taps, no logits,
documents of 4,096 tokens), decoding at a context of 1,024, the library's routes beside the kernels,
transformers, vLLM and the plain path on the same weights (see `peers`). The device's own
copy bandwidth and matrix rate, measured first, stand beside, and every figure has its share of
them. The file is written anew after each figure, so that a call that is cut short keeps what it
has.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import figures, machine, peers
from benchmarks.gpu.figures import FULL_SIZES, TINY_SIZES
from benchmarks.gpu.random_model import SHAPES, model_config, random_model, write_checkpoint
from nmoe_core.engine.model import Transformer

PARTS = ("scoring", "steps", "generating", "libraries", "transformers", "vllm", "plain")


class Report:
    """Figures so far, on the screen and in the file."""

    def __init__(self, path: Path | None) -> None:
        self.values: dict[str, Any] = {"failures": {}}
        self._path = path
        self._started = time.perf_counter()

    def add(self, name: str, value: object) -> None:
        """Take a figure, and write all."""
        self.values[name] = value
        self.values["elapsed_seconds"] = time.perf_counter() - self._started
        print(name, json.dumps(value, indent=1), flush=True)
        if self._path is not None:
            self._path.write_text(json.dumps(self.values, indent=2) + "\n")

    def measure(self, name: str, work: Callable[[], object]) -> Any:
        """Take what `work` finds; one that fails is named, and the others go on."""
        try:
            found = work()
        except Exception as error:  # noqa: BLE001 (a call on a lent machine is not repeated)
            traceback.print_exc()
            failures = {**self.values["failures"], name: f"{type(error).__name__}: {error}"[:500]}
            self.add("failures", failures)
            return None
        self.add(name, found)
        return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and return the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="20b")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--directory", type=Path, help="where the checkpoint's directory is made")
    options = parser.parse_args(arguments)
    report = Report(options.out)
    sizes = TINY_SIZES if options.shape == "tiny" else FULL_SIZES
    limits = machine.limits(options.device)
    report.add("machine", machine.facts(options.device, limits))
    report.add("shape", options.shape)
    directory = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=options.directory))
    try:
        _measure_all(report, options, limits, sizes, directory / "model")
    finally:
        shutil.rmtree(directory)
    return report.values


def _measure_all(
    report: Report,
    options: argparse.Namespace,
    limits: machine.Limits,
    sizes: figures.Sizes,
    path: Path,
) -> None:
    device, only, config = options.device, options.only, model_config(options.shape)
    if options.shape == "120b":
        model = random_model(config, device)
    else:
        started = time.perf_counter()
        write_checkpoint(path, config, device)
        report.add("write_seconds", time.perf_counter() - started)
        started = time.perf_counter()
        model = Transformer.from_checkpoint(
            path, device=device, dtype=torch.bfloat16, moe_backend="packed"
        )
        report.add("load_seconds", time.perf_counter() - started)
    report.add("model", "kernels" if model.runtime.record else "plain torch")
    if device.type == "cuda":
        report.add("resident_gb", torch.cuda.memory_allocated(device) / 1e9)
    if "scoring" in only:
        report.measure("scoring", lambda: figures.scoring(model, limits, sizes))
    rates: dict[int, float] = {}
    for batch in sizes.batch_sizes:
        if "steps" in only:
            report.measure(
                f"step, batch {batch}",
                lambda batch=batch: figures.decoding_step(model, limits, sizes, batch),
            )
        if "generating" in only:
            found = report.measure(
                f"generating, batch {batch}",
                lambda batch=batch: figures.generating(model, limits, sizes, batch),
            )
            if found is not None:
                rates[batch] = found["tokens_per_s"]
    if "libraries" in only:
        for name, what in (("experts", "mixtures"), ("attention", "attentions")):
            report.measure(
                f"{name} by route", lambda what=what: _routes(what, config, device, limits, sizes)
            )
    if options.shape == "120b":
        return
    if "transformers" in only:
        few = {batch: rates[batch] for batch in list(rates)[:2]}
        for name, setting in peers.SETTINGS.items():
            report.measure(
                f"transformers {name}",
                lambda setting=setting: peers.transformers_peer(path, setting, model, few, sizes),
            )
    if "vllm" in only:
        report.measure("vllm", lambda: peers.vllm_peer(path, rates, sizes))
    if "plain" in only:
        report.measure("plain path", lambda: peers.plain(path, model, sizes))


def _routes(what: str, *arguments: Any) -> object:
    """The library's routes; imported late, as not every torch has them."""
    from benchmarks.gpu import libraries

    return getattr(libraries, what)(*arguments)


if __name__ == "__main__":
    main()
