"""The student: scikit-learn's ridge on features that are counted one by one, its file, its card."""

import hashlib
import itertools
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from nmoe_core.base.intervals import spearman
from nmoe_core.labels.scores import QUALITY
from nmoe_core.quality.heads import student as student_module
from nmoe_core.quality.heads.ngrams import NUM_COLUMNS, SCALAR_WEIGHT, TokenTable, ngrams, scalars
from nmoe_core.quality.heads.student import Student, fit_student
from nmoe_core.quality.ridge import PENALTIES
from nmoe_core.text.tokenizer import load_tokenizer
from tests.project import failing
from tests.refusals import refused

MASK = (1 << 64) - 1
SPELLINGS = {i: f"t{i}".encode() if i > 9 else bytes([65 + i]) for i in range(5000)}
TABLE = TokenTable.of(SPELLINGS, 5000)
NO_TEST = {"test": None}


def _mixed(value: int) -> int:
    z = (value + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def _token(i: int) -> int:
    digest = hashlib.blake2b(SPELLINGS[i], digest_size=8).digest()
    return _mixed(int.from_bytes(digest, "little"))


def _twin(documents: list[np.ndarray]) -> np.ndarray:
    """Counted features by plain Python."""
    matrix = np.zeros((len(documents), NUM_COLUMNS))
    for row, document in enumerate(documents):
        tokens = [_token(i) for i in document.tolist()]
        pairs = [_mixed((a * 0xD1342543DE82EF95 + b) & MASK) for a, b in itertools.pairwise(tokens)]
        for column, count in Counter(value >> 46 for value in tokens + pairs).items():
            matrix[row, column] = count**0.5
        if tokens:
            matrix[row] /= np.linalg.norm(matrix[row])
    return matrix


def _scalars_twin(documents: list[np.ndarray]) -> np.ndarray:
    rows = []
    for ids in map(np.ndarray.tolist, documents):
        sizes = [len(SPELLINGS[i]) for i in ids]
        n = max(len(ids), 1)
        logs = sum(math.log(size) for size in sizes) / n
        rows.append([math.log(n), len(set(ids)) / n, sizes.count(1) / n, logs])
    return np.array(rows)


def _features(student: Student, documents: list[np.ndarray]) -> np.ndarray:
    values = (_scalars_twin(documents) - student.scalar_mean) / student.scalar_deviation
    return np.hstack([_twin(documents), np.clip(values, -3, 3) * SCALAR_WEIGHT])


def _documents(num: int, seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    """Random documents, and grades that follow how many ids below 50 each has."""
    rng = np.random.default_rng(seed)
    shares = rng.random(num)
    lengths = rng.integers(20, 120, num)
    documents = [
        np.where(rng.random(n) < share, rng.integers(0, 50, n), rng.integers(50, 5000, n))
        for n, share in zip(lengths, shares)
    ]
    scores = np.clip(np.rint(4 * shares[:, None] + rng.normal(0, 0.3, (num, 5))), 0, 4)
    return [document.astype(np.uint32) for document in documents], scores


def test_features_are_roots_of_hashed_counts_of_one_norm_and_four_scalars() -> None:
    documents = [*_documents(12)[0], np.array([7], np.uint32), np.empty(0, np.uint32)]
    found = ngrams(documents, TABLE).toarray()
    np.testing.assert_allclose(found, _twin(documents), atol=1e-12)
    np.testing.assert_allclose(scalars(documents, TABLE), _scalars_twin(documents), atol=1e-12)


@pytest.mark.parametrize("max_dual", [5000, 60], ids=["all at once", "the penalty from some"])
def test_weights_are_those_of_ridge_regression(
    max_dual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents, scores = _documents(120)
    monkeypatch.setattr(student_module, "MAX_DUAL", max_dual)
    student = fit_student(documents, scores, TABLE)
    features = _features(student, documents)
    seen = features.any(axis=0)  # a feature that no document has gets no weight
    twin = Ridge(alpha=student.penalty, solver="lsqr", tol=1e-12).fit(features[:, seen], scores)
    fresh, _ = _documents(20, seed=1)
    predicted = np.clip(twin.predict(_features(student, fresh)[:, seen]), 0, 4)
    # Weights are stored as float16.
    np.testing.assert_allclose(student.predict(fresh, TABLE), predicted, atol=2e-3)


def test_the_penalty_is_that_of_the_least_error_of_documents_left_out_one_by_one() -> None:
    documents, scores = _documents(14, seed=3)
    student = fit_student(documents, scores, TABLE)
    features = _features(student, documents)
    features = features[:, features.any(axis=0)]

    def error(penalty: float) -> float:
        errors = []
        for i in range(len(documents)):
            rows = np.arange(len(documents)) != i
            model = Ridge(alpha=penalty).fit(features[rows], scores[rows])
            errors.append(np.square(model.predict(features[i : i + 1])[0] - scores[i]).mean())
        return float(np.mean(errors))

    assert student.penalty == min(PENALTIES.tolist(), key=error)


def test_it_ranks_documents_that_it_has_not_seen_whatever_ids_their_tokens_have() -> None:
    student = fit_student(*_documents(400), TABLE)
    documents, scores = _documents(200, seed=9)
    predicted = student.predict(documents, TABLE)
    found = spearman(QUALITY.aggregate(predicted), QUALITY.aggregate(scores))
    assert found is not None
    assert found > 0.9
    # Another tokenizer: the same bytes have other ids, and there are more tokens.
    other = TokenTable.of({7000 - i: token for i, token in SPELLINGS.items()}, 7001)
    moved = [7000 - document.astype(np.int64) for document in documents]
    assert np.array_equal(student.predict(moved, other), predicted)


def test_scores_of_a_document_do_not_depend_on_the_batch_and_a_second_fit_is_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    student, again = (fit_student(*_documents(60), TABLE) for _ in range(2))
    documents = [*_documents(40, seed=5)[0], np.empty(0, np.uint32)]
    together = student.predict(documents, TABLE)
    alone = [student.predict([document], TABLE) for document in documents]
    assert np.array_equal(together, np.concatenate(alone))
    monkeypatch.setattr(student_module, "BLOCK_TOKENS", 100)
    assert np.array_equal(student.predict(documents, TABLE), together)
    assert np.array_equal(again.weights, student.weights)
    assert student.predict([], TABLE).shape == (0, 5)


def test_a_token_is_known_by_its_bytes_in_every_kind_of_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    texts = ["Über allen Gipfeln ist Ruh", "naïve café — 3½ €"] * 20
    own = tokenizers.Tokenizer(tokenizers.models.BPE())
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    own.train_from_iterator(texts, trainer)
    own.save(str(tmp_path / "tokenizer.json"))
    from nmoe_core.base.settings import TokenizerSettings

    settings = TokenizerSettings(str(tmp_path / "tokenizer.json"), eos_token="<|end|>")
    for tokenizer in (load_tokenizer(settings), load_tokenizer("o200k_harmony")):
        spelled = tokenizer.reference.spellings()
        for text in texts[:2]:
            ids = tokenizer.rows([text])[0].tolist()
            assert b"".join(spelled[i] for i in ids) == text.encode()


def test_pieces_are_spelled_as_text(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    source = tmp_path / "text.txt"
    source.write_text("the quick brown fox\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(source), model_prefix=str(tmp_path / "own"), vocab_size=300,
        model_type="bpe", byte_fallback=True, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    tokenizer = load_tokenizer(str(tmp_path / "own.model"))
    spelled = tokenizer.reference.spellings()
    ids = tokenizer.rows(["the fox ö"])[0].tolist()
    assert b"".join(spelled[i] for i in ids).strip() == "the fox ö".encode()


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> SimpleNamespace:
    """Labels that follow a share of tokens, by split."""
    from nmoe_core.labels.slices import read_slice
    from tests.core.small_gradings import corpus_of, slice_all, write_labels

    base = tmp_path_factory.mktemp("student")
    slices, labels = slice_all(shared_data, base / "slices"), {}
    corpus: Any = corpus_of(shared_data)
    for split in ("train", "val", "test"):
        rows = read_slice(slices / f"docids_{split}.jsonl")
        shares = [(d < 250).mean() for d in corpus.read([doc_id for doc_id, _ in rows]).tokens]
        grades = np.rint(4 * np.repeat(np.array(shares)[:, None], 5, axis=1))
        labels[split] = write_labels(base / "merged" / f"labels_{split}.jsonl", rows, grades)
    return SimpleNamespace(labels=labels, corpus=corpus, data=shared_data)


def _made(planted: SimpleNamespace, out: Path, tokenizer: Any = None, **labels: Any) -> Any:
    from nmoe_core.quality.heads.student_file import make_student
    from tests.core.small_gradings import FakeTokenizer

    tokenizer = tokenizer or FakeTokenizer()
    return make_student(planted.labels | labels, planted.corpus, tokenizer, out)


def test_its_file_has_all_that_scoring_needs_and_a_current_one_is_left_alone(
    tmp_path: Path, planted: SimpleNamespace
) -> None:
    from nmoe_core.quality.heads.student_file import load_student, token_table
    from tests.core.small_gradings import FakeTokenizer

    done = _made(planted, tmp_path)
    path = Path(done.facts["path"])
    stamp, payload = path.stat().st_mtime_ns, path.read_bytes()
    assert _made(planted, tmp_path).digest == done.digest
    assert path.stat().st_mtime_ns == stamp
    assert len(payload) < 3_000_000
    _made(planted, tmp_path / "again")
    assert (tmp_path / "again" / path.name).read_bytes() == payload
    found = load_student(path)
    documents = planted.corpus.read([*_ids(planted, "val")])
    tokenizer: Any = FakeTokenizer()
    table = token_table(tokenizer)
    predicted = found.student.predict(documents.tokens, table)
    assert np.array_equal(predicted, found.scores["val"])
    assert set(documents.digests()) - set(found.train_contents.tolist())
    assert found.header["metrics"]["spearman"] == done.facts["spearman"] > 0.5
    assert found.header["test_metrics"]["spearman"] > 0.4
    card = path.with_suffix(".md").read_text()
    assert "BLAKE2b" in card
    assert "A student without a backbone" not in card
    _made(planted, tmp_path, test=None)  # other labels to report on: another card
    assert load_student(path).header["test_metrics"] == {}


@pytest.mark.parametrize("k", [1, 2])
def test_a_file_that_is_current_has_its_own_card_whatever_failed_before(
    tmp_path: Path, planted: SimpleNamespace, k: int
) -> None:
    cards = [_made(planted, tmp_path / name, **more) for name, more in (("a", {}), ("b", NO_TEST))]
    old, new = (Path(made.facts["path"]).with_suffix(".md").read_text() for made in cards)
    with failing(f"rename:{k}:ENOSPC"), pytest.raises(OSError, match="No space"):
        _made(planted, tmp_path / "a", **NO_TEST)
    path = Path(_made(planted, tmp_path / "a", **NO_TEST).facts["path"])
    assert path.with_suffix(".md").read_text() == new != old


@pytest.mark.parametrize("k", [1, 2])
def test_a_file_that_stays_current_keeps_its_card_though_one_of_other_labels_failed(
    tmp_path: Path, planted: SimpleNamespace, k: int
) -> None:
    card = Path(_made(planted, tmp_path).facts["path"]).with_suffix(".md")
    text, made_at = card.read_text(), card.stat().st_mtime_ns
    _made(planted, tmp_path)
    assert card.stat().st_mtime_ns == made_at
    with failing(f"rename:{k}:ENOSPC"), pytest.raises(OSError, match="No space"):
        _made(planted, tmp_path, **NO_TEST)
    left = card.with_name(f"{card.name}.tmp.4194305")  # as by one that was killed
    left.touch()
    _made(planted, tmp_path)
    assert (card.read_text(), left.exists()) == (text, False)


def _ids(planted: SimpleNamespace, split: str) -> list[str]:
    from nmoe_core.labels.label_files import read_labels

    return read_labels(planted.labels[split]).doc_ids


def test_shards_of_another_tokenizer_are_refused_and_so_is_a_file_of_another_head(
    tmp_path: Path, planted: SimpleNamespace
) -> None:
    import torch

    from nmoe_core.quality.heads.head_files import save_head
    from nmoe_core.quality.heads.models import Probe
    from nmoe_core.quality.heads.shapes import ProbeArch
    from nmoe_core.quality.heads.student_file import load_student
    from tests.core.small_gradings import FakeTokenizer

    with refused("E-HEAD-TOKENIZER", "fake-tokenizer"):
        _made(planted, tmp_path, FakeTokenizer(fingerprint="other"))
    assert list(tmp_path.iterdir()) == []
    torch.manual_seed(0)
    save_head(tmp_path / "hydra_student.safetensors", Probe(ProbeArch(8)), {})
    with refused("E-HEAD-FORMAT", "kind probe"):
        load_student(tmp_path / "hydra_student.safetensors")
