"""A source of tokens: its documents are taken as they are, and decoded for their text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader.files.format import load_manifest
from nmoe_core.cli import main
from nmoe_core.shards.documents import shard_files
from nmoe_core.text.tokenizer import load_tokenizer
from tests.own_tokenizers import byte_level
from tests.project import contents, said
from tests.refusals import refused_line

TEXTS = [
    f"document {i} of the corpus, naïve 東京 " * (1 + i % 5) + f"{i * 7919}" for i in range(60)
]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a byte-level tokenizer that names its EOS and BOS."""
    directory = tmp_path_factory.mktemp("own")
    byte_level(directory, [*TEXTS, "<s>"])
    path = directory / "tokenizer.json"
    data = json.loads(path.read_text())
    bos = {"id": max(data["model"]["vocab"].values()) + 1, "content": "<s>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    data["added_tokens"].append(bos | flags)
    path.write_text(json.dumps(data))
    config = {"eos_token": "</s>", "bos_token": "<s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def write_tokens(path: Path, rows: Sequence[Sequence[int]]) -> None:
    """A file of datatrove and its index."""
    np.array([token for row in rows for token in row], "<u2").tofile(path)
    np.cumsum([*map(len, rows)]).astype("<u8").tofile(f"{path}.index")


def prep(tmp_path: Path, own: Path, name: str, *flags: str) -> list[str]:
    command = ["prep", "--source", "tokens", "--format", "datatrove", "--name", "web"]
    command += ["--paths", str(tmp_path / "in" / "*.ds"), "--tokenizer", str(own)]
    command += ["--set=prep.min_doc_tokens=1", "--num-shards=2"]
    return [*command, "--output", str(tmp_path / name / "web" / "train"), *flags]


def documents(data: Path) -> list[tuple[str, list[int], str]]:
    """Ingest id, tokens with EOS and text hash of each document, by the number in its id."""
    manifest = load_manifest(data / "web" / "train" / "manifest.json")
    files = shard_files(data, manifest)
    found = [(ids[0], row.tolist(), ids[1]) for file in files for _, row, ids in file.documents()]
    return sorted(found, key=lambda one: (one[0].partition(":")[0], int(one[0].rpartition(":")[2])))


def encoded(own: Path, texts: Sequence[str] = TEXTS) -> list[list[int]]:
    tokenizer = load_tokenizer(str(own))
    return [[*row.tolist(), tokenizer.eos_token_id] for row in tokenizer.rows(list(texts))]


def facts_of(capsys: pytest.CaptureFixture[str], command: Sequence[str]) -> dict[str, Any]:
    (facts,) = said(capsys, *command)
    return facts


def test_documents_are_those_of_the_file_and_have_the_hash_of_their_text(
    own: Path, tmp_path: Path
) -> None:
    rows = encoded(own)
    (tmp_path / "in").mkdir()
    write_tokens(tmp_path / "in" / "a.ds", rows)
    assert main(prep(tmp_path, own, "data")) == 0
    found = documents(tmp_path / "data")
    assert [row for _, row, _ in found] == rows
    assert [name for name, _, _ in found] == [f"web/a.ds:{i}" for i in range(len(rows))]
    lines = [json.dumps({"id": f"web/a.ds:{i}", "text": text}) for i, text in enumerate(TEXTS)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    command = ["prep", "--source", "jsonl", "--paths", str(tmp_path / "in.jsonl"), "--name", "web"]
    command += ["--tokenizer", str(own), "--set=prep.min_doc_tokens=1", "--num-shards=2"]
    assert main([*command, "--output", str(tmp_path / "texts" / "web" / "train")]) == 0
    assert documents(tmp_path / "texts") == found


def test_eos_inside_ends_a_document_and_a_missing_one_is_added(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(str(own))
    eos = tokenizer.eos_token_id
    a, b, c = (row[:-1] for row in encoded(own, ["one text", "another text", "a third"]))
    rows = [[*a, eos], [*a, eos, *b], [eos, *c, eos], [eos], b]
    (tmp_path / "in").mkdir()
    write_tokens(tmp_path / "in" / "a.ds", rows)
    facts = facts_of(capsys, prep(tmp_path, own, "data"))
    assert [row[:-1] for _, row, _ in documents(tmp_path / "data")] == [a, a, b, c, b]
    assert facts["documents"] == 5
    assert facts["left_out"] == 1
    info = load_manifest(tmp_path / "data/web/train/shard_0000/manifest.json").extra["source_info"]
    assert sorted(info["changed_tokens"].values()) == [1, 1, 2]


def test_bos_of_the_files_is_not_doubled(own: Path, tmp_path: Path) -> None:
    bos = load_tokenizer(str(own)).reference.own["bos"]
    rows = encoded(own)
    (tmp_path / "in").mkdir()
    write_tokens(
        tmp_path / "in" / "a.ds", [[bos, *row] if i % 2 else row for i, row in enumerate(rows)]
    )
    assert main(prep(tmp_path, own, "data", "--set=prep.bos_token=auto")) == 0
    found = documents(tmp_path / "data")
    assert [row for _, row, _ in found] == [[bos, *row] for row in rows]
    assert main(prep(tmp_path, own, "asis")) == 0
    assert [row[0] == bos for _, row, _ in documents(tmp_path / "asis")] == [False, True] * 30


def test_a_long_document_is_split_without_loss(own: Path, tmp_path: Path) -> None:
    (row,) = encoded(own, [" ".join(TEXTS)])
    (tmp_path / "in").mkdir()
    write_tokens(tmp_path / "in" / "a.ds", [row])
    assert main(prep(tmp_path, own, "data", "--set=prep.max_doc_tokens=100")) == 0
    found = [one for _, one, _ in documents(tmp_path / "data")]
    assert max(map(len, found)) <= 101
    assert [token for one in found for token in one[:-1]] == row[:-1]


def test_a_file_that_is_added_makes_the_split_grow(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = encoded(own)
    (tmp_path / "in").mkdir()
    write_tokens(tmp_path / "in" / "a.ds", rows[:40])
    assert main(prep(tmp_path, own, "data")) == 0
    write_tokens(tmp_path / "in" / "b.ds", rows[40:])
    facts = facts_of(capsys, prep(tmp_path, own, "data"))
    assert (facts["documents_reused"], facts["documents_tokenized"]) == (40, 20)
    assert [row for _, row, _ in documents(tmp_path / "data")] == rows
    assert main(prep(tmp_path, own, "again")) == 0
    grown, again = (
        contents(tmp_path / name / "web" / "train", "*.npy") for name in ("data", "again")
    )
    assert grown == again
    changed = [rows[0], *rows[:39]]  # other documents have the ids of the old ones
    write_tokens(tmp_path / "in" / "a.ds", changed)
    assert main(prep(tmp_path, own, "data")) == 0
    assert [row for _, row, _ in documents(tmp_path / "data")] == [*changed, *rows[40:]]


def test_a_slice_has_its_documents_alone_and_grows(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = encoded(own)
    (tmp_path / "in").mkdir()
    write_tokens(tmp_path / "in" / "a.ds", rows)
    assert main(prep(tmp_path, own, "data", "--split", "train[10:30]")) == 0
    assert [row for _, row, _ in documents(tmp_path / "data")] == rows[10:30]
    facts = facts_of(capsys, prep(tmp_path, own, "data", "--split", "train[20:50]"))
    assert (facts["documents_reused"], facts["documents_tokenized"]) == (10, 20)
    assert [row for _, row, _ in documents(tmp_path / "data")] == rows[20:50]


@pytest.mark.parametrize("value", [65535, 421])
def test_an_id_outside_of_the_vocabulary_is_refused_and_leaves_nothing(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: int
) -> None:
    rows = encoded(own)
    rows[7][2] = value
    (tmp_path / "in").mkdir()
    write_tokens(tmp_path / "in" / "a.ds", rows)
    line = refused_line(capsys, *prep(tmp_path, own, "data"), code="E-SOURCE-TOKENS")
    assert "a.ds: document 7" in line
    assert str(value) in line
    assert not (tmp_path / "data" / "web").exists()


def test_keys_that_contradict_the_source_are_refused(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    write_tokens(tmp_path / "in" / "a.ds", encoded(own))
    for flags, found in (
        (("--set", 'transforms=[{kind="fix_text"}]'), "transforms change texts"),
        (("--text-field", "body"), "takes tokens_field"),
        (("--id-field", "id"), "has no fields"),
        (("--encoding", "cp1252"), "does not take encoding"),
    ):
        assert found in refused_line(capsys, *prep(tmp_path, own, "data", *flags), code="E-CONFIG")
    command = prep(tmp_path, own, "data")
    del command[3:5]  # --format
    assert "needs format" in refused_line(capsys, *command, code="E-CONFIG")
