"""Shard trees and a reference stream, made without the package under test."""

import hashlib
import json
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from math import gcd
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from loader import resolve_plan
from tests.loader.shared import rotated, turn

if find_spec("torch") is not None:
    import torch.utils.data

    # A worker whose loader was left after an error is not told to end; torch waits 5 s for it.
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5

EOS = 999
VOCAB = 1000


@dataclass
class Tree:
    """A data root, with the tokens of each (source, split) kept beside it."""

    root: Path
    tokens: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)

    def add(
        self,
        name: str,
        num_tokens: int,
        *,
        split: str = "train",
        num_files: int = 3,
        seed: int = 0,
        **fields: object,
    ) -> Path:
        """Write documents of 1..40 tokens into uneven files; returns the manifest's path."""
        rng = np.random.default_rng([seed, *name.encode(), *split.encode()])
        tokens = rng.integers(0, EOS, num_tokens).astype("<u4")
        cuts = np.cumsum(rng.integers(1, 40, num_tokens))
        tokens[cuts[cuts < num_tokens] - 1] = EOS
        tokens[-1] = EOS
        ends = np.flatnonzero(tokens == EOS) + 1
        borders = [0, *sorted(rng.choice(ends[:-1], num_files - 1, replace=False)), num_tokens]
        directory = self.root / name / split
        shards = [
            write_shard(directory, name, i, tokens[a:b])
            for i, (a, b) in enumerate(pairwise(borders))
        ]
        self.tokens[name, split] = tokens
        return write_manifest(directory, name, shards, **fields)

    def one(self, name: str = "web", **settings: object) -> dict[str, object]:
        """A run over one source, in order."""
        return {"data_path": self.root / name, "batch_size": 2, "seq_len": 16} | settings

    def rows(self, *names: str, **weights: float) -> list[dict[str, object]]:
        """Sources as a run lists them, of weight 1 or of these weights."""
        weighed = dict.fromkeys(names, 1.0) | weights
        return [{"path": str(self.root / name), "weight": w} for name, w in weighed.items()]

    def flow(self, path: Path, stages: dict[str, tuple[int, dict[str, float]]], **settings: object):
        """A run over `{stage: (tokens, {source: weight})}`; its mixture and flow are in `path`."""
        mixture, flows = mixture_toml(path, stages)
        toml = {"mixture_toml": mixture, "flow_profiles_toml": flows, "flow_mode": "test"}
        return {"data_root": self.root, **toml, "batch_size": 4, "seq_len": 16} | settings


def write_shard(directory: Path, name: str, i: int, tokens: np.ndarray) -> dict[str, object]:
    stem = directory / f"shard_{i:04d}" / f"{name}-v1-shard-{i:06d}"
    stem.parent.mkdir(parents=True)
    np.save(stem.with_suffix(".npy"), tokens)
    ends = np.flatnonzero(tokens == EOS) + 1
    starts = [0, *ends[:-1]]
    body = b"".join(struct.pack("<QQ", s, e) for s, e in zip(starts, ends))
    head = struct.pack("<8sQQQ", b"NMOEIDX\0", 1, len(ends), 0)
    stem.with_suffix(".idx").write_bytes(head + body)
    return {
        "path": stem.with_suffix(".npy").relative_to(directory).as_posix(),
        "index_path": stem.with_suffix(".idx").relative_to(directory).as_posix(),
        "num_tokens": len(tokens),
        "num_documents": len(ends),
        "checksum": hashlib.sha256(stem.with_suffix(".npy").read_bytes()).hexdigest(),
    }


def write_manifest(
    directory: Path, name: str, shards: list[dict[str, object]], **fields: object
) -> Path:
    manifest = {
        "dataset": name,
        "version": "v1",
        "tokenizer": "toy",
        "vocab_size": VOCAB,
        "eos_token_id": EOS,
        "dtype": "uint32",
        "created_at": "2026-01-01T00:00:00Z",
        "total_tokens": sum(s["num_tokens"] for s in shards),
        "total_documents": sum(s["num_documents"] for s in shards),
        "num_shards": len(shards),
        "shards": shards,
        "source_info": {"source": name},
    } | fields
    path = directory / "manifest.json"
    path.write_text(json.dumps(manifest))
    return path


def swrr(weights: list[int], quotas: list[int], owed: Sequence[int] = ()) -> list[int]:
    """Smooth weighted round-robin by definition; accumulators start again when a quota is met, but
    for what sources are owed, in millionths, until one of those left was picked."""
    left, picks = list(quotas), []
    acc, is_new = [0] * len(weights), True
    while any(left):
        active = [i for i, quota in enumerate(left) if quota]
        total = sum(weights[i] for i in active)
        if is_new and owed and not set(active) & set(picks):
            unit = gcd(*(weights[i] for i in active))
            for i in active:
                acc[i] = owed[i] * (total // unit) // 10**6 * unit
        for i in active:
            acc[i] += weights[i]
        k = max(active, key=lambda i: (acc[i], -i))
        acc[k] -= total
        picks.append(k)
        left[k] -= 1
        is_new = not left[k]
        if is_new:
            acc = [0] * len(weights)
    return picks


def reference_rows(tree: Tree, plan, split: str = "train") -> tuple[list[str], np.ndarray]:
    """Source names and rows int64 [n, seq_len + 1] of the whole stream, by replay."""
    if split == "train":
        names = [
            stage.sources[i].name
            for stage in plan.stages
            for i in swrr(
                [s.weight for s in stage.sources], [s.quota_sequences for s in stage.sources]
            )
        ]
    else:
        names = [s.name for s in plan.valid for _ in range(-(-(s.num_tokens - 1) // plan.seq_len))]
    stride = plan.seq_len + (split == "train" and plan.window_stride == "seq_len+1")
    cursor, rows = dict.fromkeys(names, 0), []
    for name in names:
        tokens = tree.tokens[name, split]
        at = np.arange(cursor[name], cursor[name] + plan.seq_len + 1)
        row = tokens[at % len(tokens)].astype(np.int64)
        if split == "valid":  # padded, with a target of -100 at the end
            row[at >= len(tokens)] = EOS
            row[-1] = row[-1] if at[-1] < len(tokens) else -100
        rows.append(row)
        cursor[name] += stride
    if split == "train":
        for step in range(len(rows) // plan.batch_size):
            of_step = slice(step * plan.batch_size, (step + 1) * plan.batch_size)
            by = turn(plan, step)
            names[of_step] = rotated(names[of_step], by)
            rows[of_step] = rotated(rows[of_step], by)
    return names, np.array(rows)


def mixture_toml(path: Path, stages: dict[str, tuple[int, dict[str, float]]]) -> tuple[Path, Path]:
    """Write `{stage: (tokens, {source: weight})}` as a mixture and a flow named `test`."""
    mixtures, override, mapping = [], [], []
    for stage, (num_tokens, weights) in stages.items():
        mixtures.append(f"[mixtures.mix_{stage}]\ntotal_tokens_b = 1.0")
        for name, weight in weights.items():
            row = f'id = "{name}"\ntokens_b = {weight}\npercent = 1.0\nhf_dataset = "x/{name}"'
            mixtures.append(f"[[mixtures.mix_{stage}.sources]]\n{row}")
        override.append(f"{stage} = {num_tokens / 1e9:.12f}")
        mapping.append(f'{stage} = "mix_{stage}"')
    (path / "mix.toml").write_text("\n".join(mixtures))
    (path / "flows.toml").write_text(
        "[flow.test]\nmode = 'test'\n[flow.test.tokens_b_override]\n"
        + "\n".join(override)
        + "\n[flow.test.mixture]\n"
        + "\n".join(mapping)
    )
    return path / "mix.toml", path / "flows.toml"


def calls_of(function: Callable[[], object]) -> int:
    """Calls of Python and C functions that a call makes: work, whatever else the machine does."""
    count = 0

    def counted(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "data")


@pytest.fixture(scope="session")
def lib() -> SimpleNamespace:
    """The functions of this file, for test modules that cannot import it."""
    return SimpleNamespace(**globals())


@pytest.fixture
def plan_file(two_stages) -> Path:
    """The plan of `two_stages` beside its data."""
    path = two_stages.tree.root / "plan.json"
    path.write_text(resolve_plan(two_stages.cfg).to_json())
    return path


@pytest.fixture(scope="session")
def two_stages(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Three sources, two stages (`web` and `code` in both), a valid split; cfg for seq_len 16."""
    base = tmp_path_factory.mktemp("two_stages")
    tree = Tree(base / "data")
    for name, num_tokens in (("web", 9000), ("code", 4000), ("math", 2500)):
        tree.add(name, num_tokens)
        tree.add(name, 500, split="valid", num_files=2)
    stages = {
        "pretrain": (4800, {"web": 6.0, "code": 2.5, "math": 1.0}),
        "mid": (1616, {"math": 3.0, "web": 2.0, "code": 1.0}),
    }
    return SimpleNamespace(tree=tree, cfg=tree.flow(base, stages, batch_size=12), base=base)
