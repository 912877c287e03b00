"""Shallow embedding and clustering against the published way, one thread each, in one run.

`python -m benchmarks.curation embedding` alternates five rounds on a bfloat16 table of gpt-oss's
shape and documents of Zipf-distributed tokens: per-document gather and mean in bfloat16, against
pooling the projected table. `clustering` fits a million unit rows of 60 true groups twice:
MiniBatchKMeans with the published settings, against one streaming pass; both include labels.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

THREADS = 1
os.environ.update(OMP_NUM_THREADS=str(THREADS), OPENBLAS_NUM_THREADS=str(THREADS))

import numpy as np  # noqa: E402 (threads are read at import)
import torch  # noqa: E402

from benchmarks.rounds import alternate, ratios, spread  # noqa: E402
from nmoe_core.curate.topics.embed import pool, projection  # noqa: E402
from nmoe_core.curate.topics.model import fit_centroids, nearest_topics  # noqa: E402

VOCAB, HIDDEN, WIDTH = 201_088, 2880, 256
NUM_CLUSTERS, NUM_GROUPS, SEED = 30, 60, 0


def embedding() -> None:
    """Rates of both ways, in million tokens per second."""
    torch.set_num_threads(THREADS)
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(SEED)).bfloat16()
    texts = _texts()
    num_tokens = sum(map(len, texts))
    started = time.perf_counter()
    signs = projection(HIDDEN, WIDTH)
    blocks = [table[i : i + 8192].float().numpy() @ signs for i in range(0, VOCAB, 8192)]
    rows = torch.from_numpy(np.concatenate(blocks))
    print(f"table projected once in {time.perf_counter() - started:.1f} s")

    def published() -> float:
        for text in texts:
            mean = table[torch.from_numpy(text.astype(np.int64))].mean(dim=0)
            torch.nn.functional.normalize(mean.float(), dim=0)
        return num_tokens

    def ours() -> float:
        for _ in range(8):
            pool(texts, rows)
        return 8 * num_tokens

    rates = alternate({"published": partial(_rate, published), "ours": partial(_rate, ours)})
    for name, found in rates.items():
        print(f"{name}: {spread([rate / 1e6 for rate in found])} Mtok/s")
    gains = spread(ratios(rates["ours"], rates["published"]), ".0f")
    print(f"embedding, {num_tokens:,} tokens, 1 thread: {gains} x")


def clustering(num_rows: int) -> None:
    """Seconds and inertia of both ways."""
    from sklearn.cluster import MiniBatchKMeans

    rows = _rows(num_rows)
    started = time.perf_counter()
    centroids = fit_centroids(rows, NUM_CLUSTERS, SEED)
    labels = np.concatenate(
        [nearest_topics(rows[i : i + 65_536], centroids) for i in range(0, num_rows, 65_536)]
    )
    ours = time.perf_counter() - started
    ours_inertia = _inertia(rows, labels)
    print(f"ours: {ours:.1f} s, inertia a row {ours_inertia:.5f}", flush=True)
    started = time.perf_counter()
    published = MiniBatchKMeans(NUM_CLUSTERS, random_state=SEED, batch_size=4096, n_init=3)
    theirs_labels = published.fit_predict(rows)
    theirs = time.perf_counter() - started
    theirs_inertia = _inertia(rows, theirs_labels)
    print(f"published: {theirs:.1f} s, inertia a row {theirs_inertia:.5f}")
    print(
        f"clustering, {num_rows:,} x {WIDTH}, k {NUM_CLUSTERS}, 1 thread: {theirs / ours:.1f} x, "
        f"inertia {100 * (ours_inertia / theirs_inertia - 1):+.2f} %"
    )


def _texts() -> list[np.ndarray]:
    """700 documents of lognormal length, tokens by Zipf's law with exponent 1.1."""
    rng = np.random.default_rng(SEED)
    lengths = np.clip(rng.lognormal(6.0, 1.2, 700), 4, 50_000).astype(int)
    weight = 1 / np.arange(1, VOCAB + 1) ** 1.1
    tokens = rng.choice(VOCAB, size=lengths.sum(), p=weight / weight.sum())
    tokens = rng.permutation(VOCAB)[tokens].astype(np.uint32)
    return np.split(tokens, np.cumsum(lengths)[:-1])


def _rows(num_rows: int) -> np.ndarray:
    rng = np.random.default_rng(SEED)
    groups = rng.standard_normal((NUM_GROUPS, WIDTH), np.float32)
    shares = rng.dirichlet(np.full(NUM_GROUPS, 2.0))
    rows = rng.standard_normal((num_rows, WIDTH), np.float32)
    rows *= 1.5
    rows += groups[rng.choice(NUM_GROUPS, num_rows, p=shares)]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows


def _inertia(rows: np.ndarray, labels: np.ndarray) -> float:
    """Mean squared distance to the mean of the own cluster: the same measure for both."""
    total = 0.0
    for k in range(NUM_CLUSTERS):
        own = rows[labels == k]
        if len(own):
            total += float(np.square(own - own.mean(axis=0)).sum(dtype=np.float64))
    return total / len(rows)


def _rate(work: Callable[[], float]) -> float:
    started = time.perf_counter()
    return work() / (time.perf_counter() - started)


def main() -> None:
    """Run one part, or both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=("embedding", "clustering"))
    parser.add_argument("--rows", type=int, default=1_000_000)
    arguments = parser.parse_args()
    if arguments.part != "clustering":
        embedding()
    if arguments.part != "embedding":
        clustering(arguments.rows)


if __name__ == "__main__":
    main()
