"""Random settings of a plan over the buckets of a corpus, and the plan that the platform makes."""

import json
import random
from typing import Any

from loader import LoaderPlan
from loader.order.policies import POLICIES
from nmoe_core.tasks import curate
from tests.core.curate.bucket_plans.corpora import Corpus
from tests.core.curate.bucket_plans.naive import Settings
from tests.project import toml


def random_settings(rng: random.Random, corpus: Corpus, sizes: dict[str, int]) -> Settings:
    """Settings of a plan; some of them have to be refused."""
    policy = rng.choice(POLICIES)
    packing = rng.choice(["concat", "concat", "concat", "best_fit", "best_fit_cropped"])
    if policy == "least_consumed":
        packing = "concat"
    seq_len = rng.choice([2, 4, 8, 8, 16])
    batch_size = rng.randint(1, 6)
    passes = sum(sizes.values()) / seq_len
    found = Settings(policy, seq_len, batch_size, [], rng.randrange(2**32), packing=packing)
    found.temperature = rng.choice([1.0, 1.0, 0.7, 2.0, 5.0])
    found.window_stride = rng.choice(["seq_len", "seq_len", "seq_len+1"])
    found.on_exhaust = rng.choice(["error", "first_exhausted", "wrap", "wrap"])
    found.max_epochs = rng.choice([0, 0, 0, 3, 30])
    found.shuffle = rng.random() < 0.2
    found.shuffle_blocks = not found.shuffle and rng.random() < 0.1
    for _ in range(rng.choice([1, 1, 2])):
        some = rng.sample(corpus.sources, rng.randint(1, len(corpus.sources)))
        chosen = [name for name in corpus.sources if name in some]
        length = round(passes * rng.choice([0.2, 0.5, 0.5, 0.9, 2.0]))
        most = 6000 if rng.random() < 0.05 else 700
        length = min(max(length, batch_size, 4 * len(sizes)), most)
        found.stages.append((length, {name: rng.choice([1, 2, 3.5]) for name in chosen}))
    listed = {name for _, weights in found.stages for name in weights}
    found.epochs = {name: rng.choice([0, 0, 0, 2, 9, 40]) for name in sorted(listed)}
    found.epochs = {name: epochs for name, epochs in found.epochs.items() if epochs}
    if packing == "best_fit_cropped":  # how many rows a pass has is not compared
        found.on_exhaust, found.max_epochs, found.epochs = "wrap", 0, {}
    named = [bucket for bucket in sizes if bucket.split("/")[0] in listed]
    if all(weights.keys() == listed for _, weights in found.stages) and rng.random() < 0.3:
        found.own = {bucket: rng.choice([0.0, 1.0, 2.5, rng.random()]) for bucket in named}
        found.own[rng.choice(named)] = 1.0
    num_steps = sum(length for length, _ in found.stages) // batch_size
    starts = rng.sample(range(num_steps + 2), rng.choice([0, 0, 1, 2, 3]))
    for start in sorted(starts):
        of = rng.sample([*sorted(listed), *named], min(3, len(named)))
        phase: dict[str, Any] = {"start_step": start, "lr_scale": rng.choice([0.5, 0.1])}
        phase["dataset_weights"] = {name: rng.choice([0.0, 0.5, 1.0, 4.0]) for name in of}
        found.phases.append(phase | {"inherit": rng.choice(["original", "original", "zero"])})
    return found


def plan_of(corpus: Corpus, settings: Settings) -> LoaderPlan:
    """The plan that the platform makes of these settings."""
    directory = corpus.project.directory
    stages = dict(zip(("pretrain", "mid"), settings.stages))
    mixtures = {}
    for name, (_, weights) in stages.items():
        rows = [
            {"id": s, "kind": "jsonl", "paths": [f"in/{s}.jsonl"], "tokens_b": weight}
            | ({"max_epochs": settings.epochs[s]} if s in settings.epochs else {})
            for s, weight in weights.items()
        ]
        mixtures[f"of_{name}"] = {"sources": rows}
    flow = {
        "mixture": {name: f"of_{name}" for name in stages},
        "tokens_b_override": {n: k * settings.seq_len / 1e9 for n, (k, _) in stages.items()},
        "sample_temperature": settings.temperature,
    }
    (directory / "mixture.toml").write_text(toml({"mixtures": mixtures}))
    (directory / "flows.toml").write_text(toml({"flow": {"small": flow}}))
    names = ("policy", "seq_len", "batch_size", "seed", "packing", "window_stride", "on_exhaust")
    names += ("max_epochs", "shuffle", "shuffle_blocks", "phases")
    chosen = {name: getattr(settings, name) for name in names}
    if settings.own is not None:
        rows = "".join(f"{json.dumps(k)} = {v}\n" for k, v in settings.own.items())
        (directory / "weights.toml").write_text(f"[weights]\n{rows}")
        chosen["mixture.weights"] = str(directory / "weights.toml")
    listed = {name for _, weights in settings.stages for name in weights}
    run = corpus.run(**chosen)
    return curate.planned_loader(run, [s for s in corpus.sources if s in listed], [])[0]
