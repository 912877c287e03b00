from pathlib import Path

import numpy as np
import pytest
from sklearn.cluster import MiniBatchKMeans
from sklearn.metrics import adjusted_rand_score

from nmoe_core.curate.diversity import calibrate_k as calibrate
from nmoe_core.curate.diversity.calibrate_k import (
    KResult,
    calibrate_k,
    rule_reachable,
    rule_within_5pct,
)
from nmoe_core.curate.diversity.compare import (
    compare_embeddings,
    linear_cka,
    neighbour_overlap,
    verdict,
)
from nmoe_core.curate.topics import model as topic_model
from nmoe_core.curate.topics.clusters import fit_clusters, load_clusters, save_clusters
from nmoe_core.curate.topics.model import fit_centroids, nearest_topics
from tests.refusals import refused


def planted(num_rows: int, num_groups: int, width: int = 16, noise: float = 0.25, seed: int = 0):
    """Unit rows of planted groups, in the order of the groups, and the group of each."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((num_groups, width))
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    group = np.sort(rng.integers(0, num_groups, num_rows))
    rows = centres[group] + noise * rng.standard_normal((num_rows, width)) / np.sqrt(width) * 2
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32), group


@pytest.mark.parametrize(("first_rows", "least"), [(400, 0.75), (10_000, 0.95)])
def test_fits_find_planted_groups_in_sorted_rows(monkeypatch, tmp_path, first_rows, least):
    monkeypatch.setattr(topic_model, "FIRST_ROWS", first_rows)
    monkeypatch.setattr(topic_model, "BATCH_ROWS", 256)
    rows, group = planted(4000, 8)
    centroids = fit_centroids(rows, 8, 1)
    assert adjusted_rand_score(group, nearest_topics(rows, centroids)) > least
    np.save(tmp_path / "rows.npy", rows)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    assert fit_centroids(mapped, 8, 1).tobytes() == centroids.tobytes()


def test_a_stream_is_within_half_a_percent_of_the_published_inertia(monkeypatch):
    monkeypatch.setattr(topic_model, "FIRST_ROWS", 2048)
    monkeypatch.setattr(topic_model, "BATCH_ROWS", 2048)
    rows, _ = planted(30_000, 40, 32, noise=0.6)
    labels = nearest_topics(rows, fit_centroids(rows, 20, 0))
    published = MiniBatchKMeans(20, random_state=0, batch_size=4096, n_init=3).fit_predict(rows)
    streamed, whole = (
        sum(len(rows[of == k]) * rows[of == k].var(axis=0).sum() for k in range(20))
        for of in (labels, published)
    )
    assert streamed <= 1.005 * whole


def test_drift_is_what_new_topics_and_skewed_shares_are_and_appended_records_are_not():
    rows, group = planted(2000, 6, noise=0.1)
    clusters = fit_clusters(rows[::2], 6, 0)
    labels, distance = clusters.assign(clusters.project(rows))
    assert np.array_equal(labels[::2], clusters.assign(clusters.project(rows[::2]))[0])
    more = clusters.drift(labels, distance)
    assert not more.is_large
    assert more.share_tv < 0.05
    clusters = fit_clusters(rows[group < 5], 5, 0)
    new, skewed, same = (
        clusters.drift(*clusters.assign(clusters.project(part)))
        for part in (rows, rows[group == 0], rows[group < 5])
    )
    assert new.distance_ratio > 1.1
    assert new.is_large
    assert skewed.share_tv > 0.5
    assert (same.share_tv, same.distance_ratio) == (0, 1)


def test_saved_clusters_project_and_assign_as_before(tmp_path: Path):
    rows, _ = planted(300, 4)
    rows[3] = 0
    clusters = fit_clusters(rows, 4, 0, pca_components=3, settings={"a": 1}, version=2)
    flat = clusters.project(rows)
    assert flat.shape == (300, 3)
    assert not flat[3].any()
    np.testing.assert_allclose(np.linalg.norm(np.delete(flat, 3, axis=0), axis=1), 1, atol=1e-6)
    whole = fit_clusters(rows, 4, 0)
    np.testing.assert_allclose(whole.project(5 * rows), rows, atol=1e-6)
    save_clusters(tmp_path / "c.safetensors", clusters)
    read = load_clusters(tmp_path / "c.safetensors")
    assert read.header == clusters.header
    assert read.project(rows).tobytes() == flat.tobytes()
    assert np.array_equal(read.assign(flat)[0], clusters.assign(flat)[0])
    (tmp_path / "c.safetensors").write_bytes(b"no")
    with refused("E-CURATION-MODEL"):
        load_clusters(tmp_path / "c.safetensors")


def test_clusters_need_as_many_records_with_text_but_not_distinct_ones():
    rows = np.repeat(np.eye(3, dtype=np.float32), 5, axis=0)
    labels, distance = fit_clusters(rows, 5, 0).assign(rows)
    assert len(set(labels.tolist())) == 3
    assert distance == pytest.approx(0, abs=1e-6)
    rows[3:] = 0
    with refused("E-CURATION-TOPICS"):
        fit_clusters(rows, 4, 0)


def test_planted_groups_are_recommended(monkeypatch):
    rows, _ = planted(3000, 8, noise=0.15)
    tokens = np.full(3000, 100)
    monkeypatch.setattr(calibrate, "CANDIDATES", (2, 4, 8, 16, 32))
    found = calibrate_k(rows, tokens, 4000, 0)
    assert found.within_5pct == 8
    assert found.reachable == 16  # still above 70 % of the peak, and windows hold all of them
    assert max(found.results, key=lambda r: r.silhouette).k == 8
    assert calibrate_k(np.ones_like(rows) / 4, tokens, 4000, 0).results[0].silhouette == 0
    assert found.results[2].smallest <= found.results[2].median <= found.results[2].largest


@pytest.mark.parametrize(
    ("num_groups", "noise", "has_groups"), [(1, 5.0, False), (1, 0.3, False), (8, 0.5, True)]
)
def test_rows_without_groups_are_told_from_groups(num_groups, noise, has_groups, monkeypatch):
    monkeypatch.setattr(calibrate, "CANDIDATES", (5, 10, 20))
    rows, _ = planted(300, num_groups, noise=noise)
    assert calibrate_k(rows, np.full(300, 100), 4000, 0).has_groups == has_groups


def result(k: int, silhouette: float, reachable: float = 1.0) -> KResult:
    return KResult(k, silhouette, 1, 1.0, 1, reachable)


PUBLISHED = {10: 0.307, 20: 0.235, 30: 0.234, 40: 0.215, 50: 0.214, 100: 0.152}


@pytest.mark.parametrize(
    ("results", "within_5pct", "reachable"),
    [
        ([result(k, s) for k, s in PUBLISHED.items()], 10, 40),
        ([result(5, -0.10), result(10, -0.104), result(20, -0.3)], 10, 10),
        ([result(5, 0.5), result(10, 0.2), result(15, 0.19, 0.96), result(20, 0.2, 0.8)], 5, 15),
        ([result(5, 0.5, 0.4)], 5, None),
    ],
    ids=["published table", "peak below zero", "what windows can hold", "none"],
)
def test_the_two_rules_recommend_a_number_of_clusters(results, within_5pct, reachable):
    assert rule_within_5pct(results) == within_5pct
    assert rule_reachable(results) == reachable


def test_rotated_and_scaled_spaces_are_the_same_space():
    rows, _ = planted(300, 5)
    turned = 3 * rows @ np.linalg.qr(np.random.default_rng(1).standard_normal((16, 16)))[0]
    assert linear_cka(rows, turned) == pytest.approx(1, abs=1e-6)
    assert neighbour_overlap(rows, turned.astype(np.float32)) > 0.99
    assert linear_cka(rows, np.ones_like(rows)) == 0


def test_rows_that_are_missing_in_one_space_are_left_out():
    rows, _ = planted(100, 4)
    deep = rows.copy()
    deep[3], deep[7] = np.nan, 0
    assert compare_embeddings(rows, deep, 4, 0).comparison.num_records == 98
    with refused("E-CURATION-EMBEDDING", "different records"):
        compare_embeddings(rows, rows[:-1], 4, 0)
    with refused("E-CURATION-TOPICS", "fewer"):
        compare_embeddings(rows[:4], rows[:4], 4, 0)


def test_the_verdict_has_the_published_bands():
    found = [verdict(x) for x in (0.29, 0.3, 0.7, 0.71)]
    assert found == ["different", "moderate", "moderate", "redundant"]
