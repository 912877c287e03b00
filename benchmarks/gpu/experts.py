"""Ways of multiplying by experts at the shapes of a checkpoint, and the line that chooses one.

`python -m benchmarks.gpu.experts CHECKPOINT --rows 16384 64 1` times the values of the setting
`moe_backend` over the checkpoint's first block: rows of a batch of documents, then batches of
decoding. `hub` is skipped, with the reason, where triton_kernels is not installed or does not
compute the model; `pip install kernels` installs it.
Each line has its distance from the first, so that no fast wrong answer is taken. At the end stands
what to write into the configuration: the choice is a setting, so that every machine of a run makes
the same numbers.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu import machine
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.machine import Limits
from nmoe_core.base.errors import ConfigError
from nmoe_core.engine.backend import choose_runtime, with_experts
from nmoe_core.engine.experts import Batching, Chosen, ExpertWay
from nmoe_core.engine.weights import mxfp4
from nmoe_core.engine.weights.checkpoint import LayerTensors, open_checkpoint
from nmoe_core.engine.weights.config import ModelConfig
from nmoe_core.engine.weights.families import GPT_OSS
from nmoe_core.engine.weights.mxfp4 import DecodedExperts, ExpertForm, Experts, PackedExperts

MATRICES = 3  # matrices of hidden by intermediate size that an expert has
OWN: tuple[ExpertForm, ...] = ("packed", "decoded")
LIBRARIES: dict[Literal["grouped", "hub"], ExpertForm] = {"grouped": "decoded", "hub": "packed"}
INVARIANT = "packed, batch-invariant"
LARGEST_DISTANCE = 0.05  # from the first route, of routes that differ by rounding


class Rows(NamedTuple):
    """What a context says of a call's rows."""

    batch_invariant: bool
    min_rows: int = 1


def by_setting(
    config: ModelConfig,
    layers: Mapping[ExpertForm, LayerTensors],
    limits: Limits,
    rows: Sequence[int],
    rounds: int = 5,
) -> list[Figure]:
    """Time of one block's experts under each setting, for each number of rows.

    The last setting is no value of `moe_backend`: it is `packed` as `batch_invariant` runs it, for
    small batches the same tile without splits.
    """
    device = next(layer.attn_norm.device for layer in layers.values())
    is_interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("0", "")
    runtime = choose_runtime(config, device, (is_interpreted and config.family is GPT_OSS) or None)
    own, found = runtime.experts, list[Figure]()
    kept = {form: own.prepare(config, layer) for form, layer in layers.items()}
    others: dict[str, tuple[ExpertWay, object]] = {}
    for choice, form in LIBRARIES.items():
        asked = config, device, torch.bfloat16, "packed" in layers
        try:
            way = with_experts(runtime, choice, *asked).experts
        except ConfigError as error:
            found.append({"what": "experts", "route": choice, "skipped": str(error)})
        else:
            others[choice] = way, way.prepare(config, layers[form])
    hidden, inner, k = config.hidden_size, config.intermediate_size, config.experts_per_token
    for count in rows:
        x, residual = torch.randn(2, count, hidden, device=device, dtype=torch.bfloat16)
        top = torch.randn(count, config.num_experts, device=device).topk(k)
        chosen = Chosen(top.values.softmax(-1), top.indices.int())

        def product(
            way: ExpertWay,
            what: object,
            batching: Batching,
            operands: tuple[Tensor, Chosen, Tensor] = (x, chosen, residual),
        ) -> machine.Run:
            return lambda: way.product(what, *operands, batching)

        as_usual = Rows(batch_invariant=False)
        runs: dict[str, machine.Run] = {
            form: product(own, what, as_usual) for form, what in kept.items()
        }
        runs |= {choice: product(*other, as_usual) for choice, other in others.items()}
        if "packed" in kept:
            runs[INVARIANT] = product(own, kept["packed"], Rows(batch_invariant=True))
        flop = 2 * count * k * MATRICES * hidden * inner
        met = config.num_experts * (1 - (1 - k / config.num_experts) ** count)
        bounds = {"flop": flop, "num_bytes": met * MATRICES * hidden * inner * 4.25 / 8}
        name = f"experts, {count} rows"
        found += machine.compared(name, runs, device, limits, rounds, bounds)
    return found


def advice(figures: Sequence[Figure]) -> list[str]:
    """For each number of rows, the line of the fastest setting whose results are right."""
    lines: list[str] = []
    right = [f for f in figures if float(f.get("distance", math.inf)) <= LARGEST_DISTANCE]
    timed = [f for f in right if f["route"] != INVARIANT]
    for what in dict.fromkeys(figure["what"] for figure in timed):
        some = [f for f in timed if f["what"] == what]
        best = min(some, key=lambda figure: figure["milliseconds"])
        lines.append(f'moe_backend = "{best["route"]}"    # fastest for {what}')
    return lines


def both_forms(layer: LayerTensors) -> dict[ExpertForm, LayerTensors]:
    """A packed layer, and the same decoded."""

    def decoded(stack: Experts) -> DecodedExperts:
        assert isinstance(stack, PackedExperts)
        return DecodedExperts(mxfp4.decode(stack.blocks, stack.scales, stack.dtype))

    return {
        "packed": layer,
        "decoded": replace(layer, gate_up=decoded(layer.gate_up), down=decoded(layer.down)),
    }


def main(arguments: Sequence[str] | None = None) -> list[Figure]:
    """Measure, print the figures and the lines, and return the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.experts", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[16384, 64, 8, 1])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    with open_checkpoint(options.checkpoint, device=options.device) as opened:
        config = opened.config
        layers: dict[ExpertForm, LayerTensors] = {
            form: opened.layer(0, torch.bfloat16, form)
            for form in OWN
            if form == "decoded" or opened.is_packed
        }
    limits = machine.limits(options.device)
    with torch.inference_mode():
        found = by_setting(config, layers, limits, options.rows, options.rounds)
    for figure in found:
        print(figure)
    print(*advice(found), sep="\n")
    return found


if __name__ == "__main__":
    main()
