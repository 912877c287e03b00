"""`nmoe ablate`: what arms and evaluation texts hold, and that a planted difference is found."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.verdicts import bits_of_a_null
from loader.files.format import load_manifest
from nmoe_core.base.docid import split_of
from nmoe_core.cli import main
from nmoe_core.shards.documents import DocumentReader, document_ids
from nmoe_core.tasks.ablate.arms import ARMS, Texts
from nmoe_core.tasks.ablate.model import BATCH, CONTEXT, document_bits, train, windows_of
from nmoe_core.tasks.ablate.result import effect
from nmoe_core.tasks.selection.rule import select_shards
from nmoe_core.text.tokenizer import load_tokenizer
from tests.core.tasks.ablate.words import NATURE as WORDS
from tests.project import Project, jsonl_source, said, write_project


def _rows(name: str) -> list[dict[str, str]]:
    """Plain sentences, which are kept, and as many documents of noise, which are dropped."""
    rng = random.Random(name)
    rows = []
    for i in range(160):
        plain = " ".join(rng.choice(WORDS) for _ in range(110))
        noise = " ".join(f"{rng.getrandbits(128):032x}" for _ in range(12))
        rows += [{"id": f"p{i}", "text": plain}, {"id": f"n{i}", "text": noise}]
    return rows


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    sources = [jsonl_source(name, _rows(name), id_field="id") for name in ("a", "b")]
    settings = {"curation": {"where": "n_words >= 50"}, "attributes": {"use": ["signals"]}}
    made = write_project(tmp_path_factory.mktemp("ablate"), sources, settings)
    for verb in ("prep-mixture", "attributes"):
        assert main([verb, "--config", str(made.config)]) == 0
    for name in "ab":
        select_shards(made.run, name, range(2))
    return made


def _is_plain(text: bytes) -> bool:
    return text.decode().split()[0] in WORDS


def test_arms_hold_equal_tokens_and_only_their_own_documents(project: Project) -> None:
    texts = Texts(project.run, 40)
    arms = texts.arms(6000, 1)
    assert all(map(_is_plain, arms["kept"]))
    assert not any(map(_is_plain, arms["dropped"]))
    assert {_is_plain(text) for text in arms["random"]} == {True, False}
    tokenizer = load_tokenizer(project.run.tokenizer)
    for arm in ARMS:
        count = sum(len(tokenizer.encode_long(text.decode(), 10_000)) for text in arms[arm])
        assert count == pytest.approx(6000, abs=8)  # a cut may split a character or merge anew
    assert arms == texts.arms(6000, 1) != texts.arms(6000, 2)


def test_evaluation_text_is_in_no_arm_and_is_balanced_by_source(project: Project) -> None:
    texts = Texts(project.run, 40)
    held = {text for of_set in texts.evaluation.values() for text in of_set}
    drawn = {text[:1024] for of_arm in texts.arms(20_000, 1).values() for text in of_arm}
    assert not held & drawn
    by_source = {name: {row["text"].encode()[:1024] for row in _rows(name)} for name in "ab"}
    for of_set in texts.evaluation.values():
        assert [len(by_source[name] & set(of_set)) for name in "ab"] == [20, 20]


def test_documents_that_a_grader_saw_are_not_evaluated_on_nor_are_their_copies(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reader, tokenizer = DocumentReader(project.run.tree.data), load_tokenizer(project.run.tokenizer)
    manifests = [load_manifest(project.run.tree.manifest(name)) for name in "ab"]
    ids = [str(i) for one in manifests for i in document_ids(project.run.tree.data, one)]
    of_id = {i: tokenizer.decode(reader.tokens(i, tokenizer.eos_token_id)) for i in ids}
    labelled = [i for i in ids if split_of(i) == "train"]

    def labels(path: Path) -> tuple[str, list[dict[str, str]]]:
        return "", [{"doc_id": i} for i in labelled]

    path = project.run.tree.merged_labels("train")
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.setattr("nmoe_core.tasks.ablate.arms.read_label_file", labels)
    own = tmp_path / "own.jsonl"
    fresh = [" ".join(random.Random(k).sample(WORDS, 14)) for k in range(12)]
    texts = [*fresh, of_id[labelled[0]], of_id[labelled[1]] + " again"]
    own.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = Texts(project.run, 20, own)
    path.unlink()
    path.parent.rmdir()
    seen = {of_id[i].encode()[:1024] for i in labelled}
    assert not seen & {text for of_set in found.evaluation.values() for text in of_set}
    assert found.left_out == 2


@pytest.mark.slow
def test_a_planted_difference_is_found_and_written(
    project: Project, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trusted = tmp_path / "trusted.jsonl"
    rng = random.Random("trusted")
    lines = [" ".join(rng.choice(WORDS) for _ in range(60)) for _ in range(12)]
    trusted.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    flags = ("--tokens", 27_000, "--seeds", 3, "--documents", 20, "--eval", trusted)
    found = said(capsys, "ablate", "--config", project.config, *flags)
    assert found == read_json(project)
    for name in ("kept", "own"):
        bits = found["evaluation"][name]["bits_per_byte"]
        assert bits["kept"] < bits["random"] < bits["dropped"]
        assert found["evaluation"][name]["kept_saves"]["share"] > 0
    assert found["primary"] == "own"
    assert "this set is not the one that decides" in found["says"][0]
    assert "it lowers the loss" in found["says"][-1]


def read_json(project: Project) -> dict[str, object]:
    return json.loads((project.run.tree.root / "ablation.json").read_text("utf-8"))


def test_too_few_tokens_are_refused_before_training(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["ablate", "--config", str(project.config), "--tokens", "9000000"]
    assert main(argv) == 1
    assert "E-CURATION-ABLATE" in capsys.readouterr().err


def test_equal_seeds_train_equal_decoders_and_other_seeds_others() -> None:
    windows = windows_of([bytes(range(256)) * 40])[: 3 * BATCH]
    texts = [b"abc" * 100, b"x"]
    first, again, other = (document_bits(train(windows, s, int), texts) for s in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()


def test_bits_of_a_document_do_not_depend_on_the_documents_beside_it() -> None:
    model = train(windows_of([b"some text " * 900])[:BATCH], 0, int)
    short, long = b"some", b"some text " * 60
    together = document_bits(model, [short, long])
    alone = [document_bits(model, [text])[0] for text in (short, long)]
    np.testing.assert_allclose(together, alone, rtol=1e-5)


def test_windows_hold_every_byte_once_behind_a_separator() -> None:
    windows = windows_of([b"ab" * 200, b"c" * 300])
    assert windows.shape == (2, CONTEXT + 1)
    assert windows[0, 0] == 256
    assert windows[1, 0] == windows[0, -1]


@pytest.mark.parametrize("seeds", [3, 10, 20])
@pytest.mark.parametrize(("sources", "read"), [(1, 0.07), (2, 0.07), (10, 0.3), (3, 0.5)])
def test_arms_that_differ_by_chance_seldom_seem_to_differ(
    seeds: int, sources: int, read: float
) -> None:
    rng = np.random.default_rng([seeds, sources])
    wrong = 0
    for _ in range(200):
        low, high = effect(*bits_of_a_null(rng, seeds, sources, read), read)["ci95"]
        wrong += not low <= 0 <= high
    assert wrong / 200 <= 0.07  # 5 % and one and a half standard errors


def test_a_gain_of_five_percent_is_seen_and_more_seeds_narrow_its_interval() -> None:
    widths = []
    for seeds in (3, 20):
        ours, random, names = bits_of_a_null(np.random.default_rng(0), seeds, 5, 0.07)
        low, high = effect(0.95 * ours, random, names, 0.07)["ci95"]
        assert 0 < low < 0.05 < high
        widths.append(high - low)
    assert widths[1] < widths[0]
