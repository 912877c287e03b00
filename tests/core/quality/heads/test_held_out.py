"""What is called held out was not trained on, and shares are those of the corpus."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nmoe_core.config.heads import HeadsTable, ProbeTable
from nmoe_core.config.tree import PROBE_NAME
from nmoe_core.labels.label_files import read_labels
from nmoe_core.labels.slices import read_slice
from nmoe_core.quality.calibration.rows import rows_from_scorer
from nmoe_core.quality.heads.head_files import LoadedHead, load_head, read_header
from nmoe_core.quality.heads.metrics import held_out
from nmoe_core.quality.heads.student_scoring import StudentScorer
from nmoe_core.quality.heads.train import HeadTraining
from nmoe_core.text.near_copies import near_copies
from tests.core.small_gradings import (
    MAX_CTX,
    FakeTokenizer,
    Grading,
    corpus_of,
    random_documents,
    slice_all,
    write_head,
    write_labels,
    write_source,
    write_student,
)
from tests.refusals import refused


def test_the_first_document_of_each_content_that_was_not_seen_is_held_out() -> None:
    found = held_out([1, 1, 2, 3, 3], [3, 7])
    assert found.rows.tolist() == [True, False, True, False, False]
    assert (found.num_seen, found.num_repeated) == (2, 1)


@pytest.fixture(scope="module")
def repeated(tmp_path_factory: pytest.TempPathFactory, backbone: Any) -> Any:
    """A corpus whose better half consists of copies of documents that train has too."""
    base = tmp_path_factory.mktemp("repeated")
    documents = random_documents(5, 500)
    rng = np.random.default_rng(5)
    documents += [documents[i] for i in rng.integers(0, 60, 500)]
    order = rng.permutation(len(documents))
    write_source(base / "data", "web", [documents[i] for i in order], num_shards=3)
    write_source(base / "data", "books", random_documents(6, 20))
    slices = slice_all(base / "data", base / "slices")
    rows = {s: read_slice(slices / f"docids_{s}.jsonl") for s in ("train", "val", "test")}
    corpus = corpus_of(base / "data")
    seen = {s: corpus.read([doc_id for doc_id, _ in listed]) for s, listed in rows.items()}
    labels = {}
    for split, documents in seen.items():
        means = (int(tokens.mean()) for tokens in documents.tokens)
        grades = np.array([[mean // (40 + 7 * d) % 5 for d in range(5)] for mean in means])
        labels[split] = write_labels(base / f"labels_{split}.jsonl", rows[split], grades)
    return SimpleNamespace(
        data=base / "data", rows=rows, documents=seen, labels=labels, model=backbone
    )


def digests(repeated: Any, split: str) -> np.ndarray:
    return repeated.documents[split].digests()


def train(repeated: Any, heads: Path, **labels: Path | None) -> LoadedHead:
    """A probe trained without test labels, unless `labels` holds some."""
    labels = repeated.labels | {"test": None} | labels
    table = HeadsTable(probe=ProbeTable(epochs=3))
    HeadTraining("probe", labels, corpus_of(repeated.data), repeated.model, heads, table).run()
    return load_head(heads / PROBE_NAME, repeated.model, MAX_CTX)


def test_a_head_is_measured_on_contents_it_was_not_trained_on(
    repeated: Any, tmp_path: Path
) -> None:
    metrics = train(repeated, tmp_path).header["metrics"]
    seen, val = digests(repeated, "train"), digests(repeated, "val")
    fresh = np.setdiff1d(val, seen)
    assert metrics["num_trained_on"] == np.isin(val, seen).sum() > 20
    assert metrics["n"] == len(fresh) < len(val)
    assert metrics["n"] + metrics["num_trained_on"] + metrics["num_repeated"] == len(val)
    card = (tmp_path / "hydra_probe.md").read_text()
    assert (
        f"Excluded: {metrics['num_trained_on']} documents whose content was used in training"
        in card
    )
    assert "No figure exists of documents that are untouched" in card


def test_test_labels_are_reported_apart_and_like_val_labels_move_no_weight(
    repeated: Any, tmp_path: Path
) -> None:
    without = train(repeated, tmp_path / "without")
    made = train(repeated, tmp_path / "with", test=repeated.labels["test"])
    used = np.concatenate([digests(repeated, split) for split in ("train", "val")])
    test = digests(repeated, "test")
    assert made.header["test_metrics"]["n"] == len(np.setdiff1d(test, used)) > 10
    assert "untouched" not in (tmp_path / "with" / "hydra_probe.md").read_text()
    assert without.header["test_metrics"] == {}
    assert made.header["metrics"] == without.header["metrics"]
    (empty := tmp_path / "empty").write_bytes(b"")
    others = [train(repeated, tmp_path / f"{i}", val=val) for i, val in enumerate([None, empty])]
    others.append(train(repeated, tmp_path / "other", val=repeated.labels["test"]))
    assert [bool(other.header["metrics"]) for other in others] == [False, False, True]
    for name, weights in without.head.state_dict().items():
        assert all(torch.equal(weights, other.head.state_dict()[name]) for other in (made, *others))


def test_near_copies_of_what_was_trained_on_are_left_out_of_heads_student_and_calibration(
    tmp_path: Path, backbone: Any
) -> None:
    documents = [one for one in random_documents(7, 700) if len(one) >= 12]
    rng = np.random.default_rng(7)
    # A copy has another last token: one of its shingles differs, so it is no equal content.
    copies = [[*documents[i][:MAX_CTX][:-1], 499] for i in rng.integers(0, len(documents), 200)]
    copies += [[*documents[i][:MAX_CTX][:-3], *range(3)] for i in range(100)]
    write_source(tmp_path / "data", "web", [*documents, *copies], num_shards=2)
    write_source(tmp_path / "data", "books", random_documents(8, 20))
    slices = slice_all(tmp_path / "data", tmp_path / "slices")
    rows = {s: read_slice(slices / f"docids_{s}.jsonl") for s in ("train", "val", "test")}
    corpus = corpus_of(tmp_path / "data")
    read = {s: corpus.read([doc_id for doc_id, _ in listed]).tokens for s, listed in rows.items()}
    labels: dict[str, Path | None] = {
        split: write_labels(
            tmp_path / f"labels_{split}.jsonl", rows[split], rng.integers(0, 5, (len(tokens), 5))
        )
        for split, tokens in read.items()
    }
    near_train = near_copies(read["val"], read["train"])
    near_any = near_copies(read["test"], [*read["train"], *read["val"]])
    exact = np.isin(*(corpus.read([d for d, _ in rows[s]]).digests() for s in ("val", "train")))
    assert near_train.sum() - exact.sum() > 5
    alike = near_copies(read["val"], read["train"], 0.5)
    heads = tmp_path / "heads"
    table = HeadsTable(probe=ProbeTable(epochs=1))
    write_student(labels, corpus, heads)
    HeadTraining("probe", labels, corpus, backbone, heads, table).run()
    for name in ("hydra_student", "hydra_probe"):
        header = read_header(heads / f"{name}.safetensors")
        metrics, test = header["metrics"], header["test_metrics"]
        assert metrics["num_trained_on"] == near_train.sum()
        assert metrics["num_near_copies"] == (near_train & ~exact).sum()
        assert metrics["n"] + metrics["num_repeated"] == (~near_train).sum()
        assert test["num_trained_on"] == near_any.sum()
        assert 0 < metrics["num_alike"] <= (alike & ~near_train).sum()
        said = f"Included: {metrics['num_alike']} documents that resemble one used in training"
        assert said in (heads / f"{name}.md").read_text()
    scorer: Any = StudentScorer.load(heads / "hydra_student.safetensors", FakeTokenizer())  # pyright: ignore[reportArgumentType]
    found = rows_from_scorer(scorer, corpus, read_labels(tmp_path / "labels_val.jsonl"))
    assert found.left_out["trained_on"] == near_train.sum()
    assert not (found.is_held_out & near_train).any()


@pytest.fixture
def calibrated(repeated: Any, tmp_path: Path) -> Any:
    """Heads that were trained on the contents of train, and their calibration."""
    made = Grading(tmp_path, repeated.data, repeated.model)
    seen = digests(repeated, "train")
    for path in made.heads.iterdir():
        write_head(made.heads, load_head(path, made.model, MAX_CTX).head, made.model, seen)
    made.labels = repeated.labels["val"]
    made.repeated = repeated
    return made


def test_the_share_to_keep_is_that_of_the_corpus_with_its_copies(calibrated: Any) -> None:
    summary = calibrated.calibrate(target_keep=0.5)
    val = calibrated.rows_of(calibrated.repeated.rows["val"])
    kept = np.mean([row["decision"] == "keep" for row in val])
    documents = summary["documents_fit"], summary["documents_report"]
    shares = summary["achieved_keep_fit"], summary["achieved_keep"]
    assert sum(documents) == len(val)
    assert kept == pytest.approx(np.average(shares, weights=documents), abs=1e-6)
    # Copies of a text are kept or left together, so a share is hit to within one text's copies.
    _, copies = np.unique(digests(calibrated.repeated, "val"), return_counts=True)
    assert abs(shares[0] - 0.5) <= copies.max() / documents[0]
    low, high = summary["achieved_keep_ci95"]
    corpus = [row for rows in calibrated.repeated.rows.values() for row in rows]
    of_all = [r["decision"] == "keep" for r in calibrated.rows_of(corpus)]
    assert low <= np.mean(of_all) <= high


def test_quality_figures_leave_out_what_heads_were_trained_on_and_test_labels_move_no_threshold(
    calibrated: Any,
) -> None:
    labels = calibrated.repeated.labels["test"]
    summary = calibrated.calibrate(labels_test=labels)
    seen, val, test = (digests(calibrated.repeated, split) for split in ("train", "val", "test"))
    assert summary["count"] == len(np.setdiff1d(val, seen))
    assert summary["left_out"]["trained_on"] == np.isin(val, seen).sum()
    assert summary["heads"]["judge"]["n"] == summary["count_report"]
    assert summary["test"]["count"] == len(np.setdiff1d(test, np.concatenate([seen, val])))
    assert summary["test"]["documents"] == len(test)
    assert summary["untouched"] == f"{summary['test']['count']} documents of the test slice"
    without = calibrated.calibrate()
    assert without["test"] is None
    assert without["untouched"] == "no figure: the test slice has no labels"
    own = ("test", "untouched", "fingerprints", "content_hash")
    assert summary | {key: without[key] for key in own} == without
    other = labels.with_name("labels_other.jsonl")
    other.write_text(labels.read_text().replace('"fake"', '"other"'))
    with refused("E-LABEL-MIXED", "another scorer"):
        calibrated.calibrate(labels_test=other)
