"""Runs `nmoe mix`: tries mixtures, proposes weights, and tests the proposal with new seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loader.plan.file import load_plan
from loader.plan.records import LoaderPlan
from nmoe_core.base.atomic import replacing, write_json
from nmoe_core.base.errors import ConfigError
from nmoe_core.config.run import Run
from nmoe_core.tasks.ablate.mix import runs as small
from nmoe_core.tasks.ablate.mix.fit import Fit
from nmoe_core.tasks.ablate.mix.mixtures import draw_mixtures, within
from nmoe_core.tasks.ablate.mix.texts import Domain, read_domains, read_target
from nmoe_core.tasks.ablate.result import effect
from nmoe_core.text.tokenizer import load_tokenizer

FORMAT = "nmoe-mix/1"
NAME = "mix.json"
RUNS_NAME = ".mix"
SMALLER = 4  # the smaller size of the decoders' text
DEFAULT_EPOCHS = 4  # passes after which repeated text teaches much less (arXiv 2305.16264)
_ARM_DIFFERS = 0.005  # of a share, from which on an arm is another one


@dataclass(frozen=True, slots=True)
class Settings:
    """The size of the search.

    Attributes:
        runs: Mixtures to try.
        tokens: Tokens of each decoder; the same mixtures are tried with a quarter of them too.
        seeds: Decoders per mixture that is tested at the end.
        documents: Documents to hold out of each source.
        targets: Files of trusted texts by name. They alone decide, if there are any; else the
            held-out documents of the sources do, each source with its share of the plan.
    """

    runs: int = 24
    tokens: int = 100_000
    seeds: int = 5
    documents: int = 60
    targets: Mapping[str, Path] | None = None


def mix(run: Run, settings: Settings) -> dict[str, Any]:
    """Try mixtures of the sources of the run's plan, and commit `mix.json` in the root.

    Returns the content of the file. Raises the errors of `read_domains` and `Bench.bits`,
    ConfigError if the plan has one source or several stages with different weights (E-MIX-PLAN), or
    a target has the name of a source; after an error, no file is written, but finished decoders are
    kept for the next command.
    """
    plan = load_plan(run.tree.plan)
    shares = _shares(plan, run.tree.plan)
    targets = settings.targets or {}
    names = [source.name for source in plan.sources]
    if taken := sorted(set(names).intersection(targets)):
        do = "give the target another name"
        raise ConfigError("a target has the name of a source", found=taken[0], do=do)
    own = {name: read_target(path) for name, path in targets.items()}
    seed = run.loader.seed
    tokenizer = load_tokenizer(run.tokenizer)
    domains = read_domains(plan, tokenizer, settings.tokens, settings.documents, seed)
    search = _Search(run, plan, shares, domains, own, settings)
    found = search.result()
    path = run.tree.root / NAME
    with replacing(path):
        write_json(path, found)
    return found


def _shares(plan: LoaderPlan, where: Path) -> np.ndarray:
    """The share of each source in the plan's weights: float64 `[sources]`."""
    stages = [{one.name: one.weight for one in stage.sources} for stage in plan.stages]
    if len(plan.sources) < 2 or any(stage != stages[0] for stage in stages):
        found = f"{len(plan.sources)} sources, {len(stages)} stages"
        raise ConfigError(
            "mixtures are tried for a plan with several sources and one set of weights",
            where=where,
            found=found,
            do="name a flow with one stage: --set flow_mode=...",
            code="E-MIX-PLAN",
        )
    weights = np.array([stages[0][source.name] for source in plan.sources], np.float64)
    return weights / weights.sum()


class _Search:
    """One search: its texts, and what was found."""

    def __init__(
        self,
        run: Run,
        plan: LoaderPlan,
        shares: np.ndarray,
        domains: Sequence[Domain],
        own: Mapping[str, Sequence[bytes]],
        settings: Settings,
    ) -> None:
        self.plan = plan
        self.shares = shares
        self.domains = domains
        self.settings = settings
        self.seed = run.loader.seed
        self.names = [domain.name for domain in domains]
        held_out = {domain.name: domain.held_out for domain in domains}
        self.targets: dict[str, Sequence[bytes]] = {**held_out, **own}
        # Own targets decide alone: text that the sources do not resemble is the fairest judge.
        weights = dict(zip(self.names, shares.tolist()))
        if own:
            weights = dict.fromkeys(own, 1 / len(own))
        self.weights = np.array([weights.get(name, 0.0) for name in self.targets])
        self.sizes = {name: sum(map(len, texts)) for name, texts in self.targets.items()}
        self.natural = np.array([float(domain.num_tokens) for domain in domains])
        self.natural /= self.natural.sum()
        self.most = self._most()
        directory = run.tree.root / RUNS_NAME
        self.bench = small.Bench(domains, self.targets, run.config.compute, directory)

    def result(self) -> dict[str, Any]:
        """Try, propose, and test."""
        mixtures = draw_mixtures(self.shares, self.most, self.settings.runs, self.seed)
        fits = {}
        losses = {}
        for num_tokens in (self.settings.tokens // SMALLER, self.settings.tokens):
            trials = [
                small.Run(shares, num_tokens, self.seed + k) for k, shares in enumerate(mixtures)
            ]
            losses[num_tokens] = self._losses(trials, f"mix at {num_tokens:,} tokens")
            fits[num_tokens] = Fit(mixtures, losses[num_tokens], self.weights, self.seed)
        fit = fits[self.settings.tokens]
        proposal = fit.propose(self.most)
        proposed = self.shares
        if fit.has_effect:  # a plan refuses a source with a weight and no sequence
            least = np.maximum(proposal.shares, 1 / self.plan.num_sequences)
            proposed = within(least, self.most)
        tested = self._tested(proposed)
        found = {
            "format": FORMAT,
            "plan_hash": self.plan.plan_hash,
            "settings": {
                "runs": self.settings.runs,
                "tokens": self.settings.tokens,
                "seeds": self.settings.seeds,
                "held_out": {name: len(texts) for name, texts in self.targets.items()},
            },
            "deciding": {n: w for n, w in zip(self.targets, self.weights.round(6).tolist()) if w},
            "sources": {
                name: {
                    "plan": round(float(self.shares[k]), 4),
                    "natural": round(float(self.natural[k]), 4),
                    "most": round(float(self.most[k]), 4),
                    "proposed": round(float(proposed[k]), 6),
                    "ci95": [round(float(end[k]), 4) for end in (proposal.low, proposal.high)],
                }
                for k, name in enumerate(self.names)
            },
            "family": fit.family,
            "errors": {name: round(error, 4) for name, error in fit.errors.items()},
            "effects": self._effects(fit),
            "sizes": self._sizes(fits, proposed),
            "tested": tested,
            "mixtures": mixtures.round(6).tolist(),
            "losses": {str(size): rows.round(6).tolist() for size, rows in losses.items()},
        }
        found["says"] = list(_says(found))
        return found

    def _most(self) -> np.ndarray:
        """The largest share of each source that its text allows, in the plan and in a decoder's
        text."""
        plan = self.plan
        planned = plan.num_sequences * plan.seq_len
        passes = [max(one.max_epochs or plan.max_epochs, DEFAULT_EPOCHS) for one in plan.sources]
        sizes = [source.num_tokens for source in plan.sources]
        of_plan = np.array([count * size / planned for count, size in zip(passes, sizes)])
        pools = np.array([int(domain.lengths.sum()) for domain in self.domains])
        of_pool = DEFAULT_EPOCHS * pools / self.settings.tokens
        most = np.minimum(np.minimum(of_plan, of_pool), 1.0)
        # The plan's own shares are possible, whatever the rule of thumb says.
        return np.maximum(most, self.shares)

    def _losses(self, trials: Sequence[small.Run], what: str) -> np.ndarray:
        """Bits per byte of each target: float64 `[runs, targets]`."""
        rows = self.bench.bits(trials, what)
        return np.array([[row[n].sum() / self.sizes[n] for n in self.targets] for row in rows])

    def _effects(self, fit: Fit) -> list[dict[str, Any]]:
        """What more of each source does to each deciding target."""
        changes = fit.effects(self.shares)
        found = []
        for k, source in enumerate(self.names):
            for t, target in enumerate(self.targets):
                if self.weights[t]:
                    change, low, high = (round(float(x), 6) for x in changes[k, t])
                    row = {"source": source, "target": target, "change": change}
                    found.append({**row, "ci95": [low, high]})
        return found

    def _sizes(self, fits: Mapping[int, Fit], proposed: np.ndarray) -> dict[str, Any]:
        """What the proposal saves against the plan as predicted at both sizes, and on a line
        through both to the plan's own tokens."""
        small_size, size = fits
        values = [fits[n].differences(proposed, self.shares) for n in (small_size, size)]
        planned = self.plan.num_sequences * self.plan.seq_len
        factor = math.log(planned / size) / math.log(size / small_size)
        values.append(values[1] + factor * (values[1] - values[0]))
        other = fits[small_size].propose(self.most).shares
        sizes = (small_size, size, planned)
        return {
            "saves": [
                {"tokens": n, **_share_saved(one)} for n, one in zip(sizes, values, strict=True)
            ],
            "proposed_with_fewer_tokens": dict(zip(self.names, other.round(4).tolist())),
        }

    def _tested(self, proposed: np.ndarray) -> list[dict[str, Any]]:
        """The proposal against other mixtures, with seeds that no trial had."""
        others = {
            "plan": self.shares,
            "natural": within(self.natural, self.most),
            "uniform": within(np.ones(len(self.names)), self.most),
        }
        others = {k: v for k, v in others.items() if np.abs(v - proposed).max() > _ARM_DIFFERS}
        if not others:
            return []
        arms = {"proposed": proposed, **others}
        first = self.seed + self.settings.runs
        seeds = range(first, first + self.settings.seeds)
        trials = [
            small.Run(shares, self.settings.tokens, seed)
            for shares in arms.values()
            for seed in seeds
        ]
        rows = self.bench.bits(trials, "mix, test of the proposal")
        weighted = [self._weighted(row) for row in rows]
        by_arm = np.array(weighted).reshape(len(arms), len(seeds), -1)
        owners = [name for name in self._deciding() for _ in self.targets[name]]
        tokens = sum(int(domain.lengths.sum()) for domain in self.domains)
        read = min(1.0, self.settings.tokens / tokens)
        return [
            {"against": name, **effect(by_arm[0], by_arm[k], owners, read)}
            for k, name in enumerate(others, start=1)
        ]

    def _deciding(self) -> list[str]:
        return [name for name, weight in zip(self.targets, self.weights.tolist()) if weight]

    def _weighted(self, row: Mapping[str, np.ndarray]) -> np.ndarray:
        """The part of each text in the objective, so that their sum is the weighted mean of the
        targets' bits per byte."""
        weights = dict(zip(self.targets, self.weights.tolist()))
        return np.concatenate([row[n] * weights[n] / self.sizes[n] for n in self._deciding()])


def weights_toml(found: Mapping[str, Any]) -> str:
    """The proposed weights as the file of `mixture.weights`, with what they were made from."""
    lines = [
        "# Proposed by nmoe mix. What it found:",
        *(f"#   {line}" for line in found["says"]),
        f"# It was tried over the plan {found['plan_hash']}.",
        "",
        "[weights]",
    ]
    lines += [f"{json.dumps(n)} = {one['proposed']}" for n, one in found["sources"].items()]
    return "\n".join(lines) + "\n"


def _share_saved(differences: np.ndarray) -> dict[str, Any]:
    """The share of the loss that is saved, from differences of logarithms: the estimate, then the
    draws."""
    saved = -np.expm1(differences)
    low, high = np.quantile(saved[1:], [0.025, 0.975])
    return {
        "share": round(float(saved[0]), 6),
        "ci95": [round(float(low), 6), round(float(high), 6)],
    }


def _says(found: Mapping[str, Any]) -> Sequence[str]:
    """What was found, in sentences."""
    settings = found["settings"]
    decides = ", ".join(found["deciding"])
    left = found["errors"][found["family"]]
    lines = [
        f"{settings['runs']} mixtures of {len(found['sources'])} sources were tried with "
        f"{settings['tokens']:,} tokens each; the loss on {decides} decides."
    ]
    if found["family"] == "constant":
        lines.append(
            "No effect of the mixture is shown: a constant predicts the losses of runs that were "
            "left out best. The plan's weights stay."
        )
    else:
        lines.append(
            f"The losses follow {found['family']} of the shares: the error on runs that were left "
            f"out is {left:.0%} of a constant's."
        )
    for row in found["effects"]:
        low, high = row["ci95"]
        if low > 0 or high < 0:
            does = "lowers" if high < 0 else "raises"
            lines.append(
                f"Ten points more of {row['source']} {does} the loss on {row['target']} by "
                f"{abs(row['change']):.2%} [{min(abs(low), abs(high)):.2%}, "
                f"{max(abs(low), abs(high)):.2%}]."
            )
    for row in found["tested"]:
        low, high = row["ci95"]
        verdict = "it is better" if low > 0 else "it is worse"
        if low <= 0 <= high:
            verdict = "no difference is shown"
        lines.append(
            f"With {settings['seeds']} new seeds the proposal saves {row['share']:.2%} "
            f"[{low:.2%}, {high:.2%}] of the loss against {row['against']}: {verdict}."
        )
    if not found["tested"]:
        lines.append("The proposal is the plan's own mixture, so there was nothing to test.")
    else:
        planned = found["sizes"]["saves"][-1]
        low, high = planned["ci95"]
        lines.append(
            f"A line through both sizes gives {planned['share']:.2%} [{low:.2%}, {high:.2%}] "
            f"against the plan at its {planned['tokens']:,} tokens: an extrapolation, and to a "
            "larger model too, which these runs cannot test."
        )
    return lines
