"""A passage in every place of a run, in every form, is found; and it is gone after the removal."""

import gzip
import io
import json
import lzma
import re
import shutil
import sqlite3
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from nmoe_core.audit.takedown.places import places
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.config.run import Run
from nmoe_core.config.tree import Tree
from nmoe_core.tasks import curate
from nmoe_core.text.tokenizer import load_tokenizer
from tests.core.audit.takedown.corpus import BUCKETS, Texts, command_of, listed, run_of, written
from tests.core.curate.corpus import Corpus
from tests.project import json_lines, read_rows, said

pytestmark = pytest.mark.usefixtures("fixed_clock")
_TOKENIZER = load_tokenizer(TokenizerSettings())
_SPELLED = {i: _TOKENIZER.decode([i]) for i in range(1200)}
_SPACED = {text[1:]: i for i, text in _SPELLED.items() if re.fullmatch(" [a-z]{3,}", text)}
_BARE = {text: i for i, text in _SPELLED.items() if text in _SPACED}
_SIGNS = {text: i for i, text in _SPELLED.items() if text in ('"', "\\", "\n", "<", ",")}


def _tokens(seed: int) -> np.ndarray:
    """Tokens of a text of 90 words, that the embeddings of the corpus know."""
    rng = np.random.default_rng(seed)
    return rng.choice([*_SPACED.values()], 90)


_TOKENS = np.array([*_tokens(6)[:9], *_SIGNS.values(), *_tokens(7), *_SIGNS.values()])
GONE = _TOKENIZER.decode(_TOKENS)
PASSAGE = _TOKENIZER.decode(_tokens(7))


def _curate(run: Run) -> None:
    curate.curate_shards(run, "web", range(BUCKETS))
    curate.combine(run, "web")


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    texts: Texts = {f"doc-{i:04d}": _tokens(100 + i) for i in range(60)}
    texts["gone"] = _TOKENS
    corpus = written(tmp_path_factory.mktemp("made") / "run", texts)
    run = run_of(corpus)
    corpus.fit()
    for bucket in range(BUCKETS):
        corpus.assign(bucket)
        corpus.grade(bucket, lambda i: "keep")
    _curate(run)
    return corpus


@pytest.fixture
def made(made_once: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Corpus, Run]:
    corpus = made_once.copied(tmp_path / "run")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
    (tmp_path / "dagster").mkdir()
    return corpus, Run(corpus.root / "run.toml")


def _zip(payload: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/b.txt", payload)
    return file.getvalue()


def _parquet(**columns: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


_LINE = json.dumps({"text": GONE, "n": 1}).encode()
# The document in every form of a file; some hold its beginning alone.
FORMS: dict[str, bytes] = {
    "line.jsonl": b'{"text": "another"}\n' + _LINE,
    "twice.json": json.dumps({"inner": _LINE.decode()}).encode(),
    "page.html": GONE.replace('"', "&quot;").replace("\n", "<br>").encode(),
    "shouted.txt": GONE.upper().replace(" ", "\n").encode(),
    "snippet.txt": b"x" * 5_000_000 + GONE[:170].encode(),
    "over_a_block.txt": b"-" * (4 * 2**20 - 300) + GONE.encode(),
    "line.jsonl.gz": gzip.compress(_LINE),
    "line.zst": zstandard.compress(_LINE),
    "line.xz": lzma.compress(_LINE),
    "texts.zip": _zip(_LINE),
    "rows.parquet": _parquet(name=["a", "b"], rows=[[{"text": GONE}], []]),
    "tokens.parquet": _parquet(tokens=[[1, 2], _TOKENS.tolist()]),
    "uint32.bin": b"\0\0\0" + _TOKENS.astype("<u4").tobytes(),
    "uint32.gz": gzip.compress(b"\1" + _TOKENS.astype("<u4").tobytes()),
}


def _planted(run: Run, home: Path) -> set[str]:
    """Files of every form, in turn, below every directory of the run."""
    tree = run.tree
    roots = [getattr(tree, field.name) for field in fields(Tree) if field.name != "checkpoint"]
    directories = [root if not root.suffix else root.parent for root in roots]
    directories += [tree.picture("").parent, tree.data / "web" / ".train.versions" / "old"]
    found = set()
    for i, (name, payload) in enumerate(FORMS.items()):
        for path in (directories[i % len(directories)] / name, home / "storage" / name):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(payload)
            found.add(str(path))
    for number, directory in enumerate(directories):
        path = directory / f"also_{number}.txt"
        path.write_text(GONE)
        found.add(str(path))
    database = sqlite3.connect(home / "events.db")
    database.execute("create table events (body text)")
    database.execute("insert into events values (?)", [json.dumps({"sample": GONE[:170]})])
    database.commit()
    database.close()
    return {*found, str(home / "events.db")}


def _opened(path: Path) -> Iterator[bytes]:
    """The bytes of a file, and those of what it holds, by nothing of the product."""
    payload = path.read_bytes()
    yield payload
    openers: dict[bytes, Callable[[bytes], bytes]] = {
        b"\x1f\x8b": gzip.decompress,
        b"\x28\xb5\x2f\xfd": lambda part: zstandard.ZstdDecompressor().decompress(part),
        b"\xfd7zXZ": lzma.decompress,
    }
    for magic, opener in openers.items():
        if payload.startswith(magic):
            yield opener(payload)
    if payload.startswith(b"PAR1"):
        yield str(pq.read_table(path).to_pylist()).encode()
    if payload.startswith(b"PK"):
        with zipfile.ZipFile(path) as archive:
            yield from map(archive.read, archive.namelist())


def _holding(root: Path) -> set[str]:
    """Files that hold a passage of the document, in clear or as tokens: by brute force."""
    middle = _TOKENS[20:80]
    needles = [PASSAGE[20:120].encode(), middle.astype("<u4").tobytes()]
    needles += [middle.astype("<u2").tobytes(), str(middle.tolist())[1:-1].encode()]
    found = set()
    for path in root.rglob("*"):
        if path.is_file() and "uint16" not in path.name:
            parts = (b" ".join(part.lower().split()) for part in _opened(path))
            raw = [*_opened(path), *parts]
            if any(needle in part for part in raw for needle in needles):
                found.add(str(path))
    return found


def test_every_field_of_the_tree_is_a_place(made: tuple[Corpus, Run]) -> None:
    _, run = made
    named = {path for place in places(run) for path in place.paths}
    assert {getattr(run.tree, field.name) for field in fields(Tree)} <= named


def test_a_planted_passage_is_found_in_every_place_and_in_every_form(
    made: tuple[Corpus, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run = made
    home = tmp_path / "dagster"
    export = tmp_path / "elsewhere" / "export.bin"
    planted = _planted(run, home)
    export.parent.mkdir()
    export.write_bytes(b"\0" + _TOKENS.astype("<u4").tobytes())
    said(capsys, *command_of(run, listed(corpus, "id:gone"), "--apply"))
    _curate(run)
    command = command_of(run, corpus.root.parent / "gone.txt", "--verify")
    plain = said(capsys, *command)
    assert plain["holds"], "the curated shards alone"
    assert str(run.tree.labels) in " ".join(plain["not_covered"])
    proof = said(capsys, *command, "--everywhere", export.parent, status=1)
    found = {row["path"] for row in proof["found"]}
    assert found == planted | {str(export)}
    assert found == {path for path in _holding(tmp_path) if not path.endswith(".npy")}
    assert {row["tree"] for row in proof["remaining"]} == {"data"}
    assert proof["unreadable"] == []
    assert len({row["remedy"] for row in proof["found"]}) > 5
    for path in found:
        Path(path).unlink()
    shutil.rmtree(run.tree.shard("web", 0).tree.data)
    assert _holding(tmp_path) == set()


def test_texts_in_labels_are_erased_and_the_labels_stay_whole(
    made: tuple[Corpus, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run = made
    path = listed(corpus, "id:gone")
    (row,) = [
        one for one in said(capsys, *command_of(run, path))["documents"] if one["tree"] == "data"
    ]
    label = {"source": "web", "ok": True, "snippet": GONE[:200], "scores": {}, "aggregated": 0.5}
    labels = [{"doc_id": row["doc_id"], **label}, {"doc_id": "other", **label, "snippet": "stays"}]
    shard = run.tree.label_shard("train", 2) / "scores.jsonl"
    shard.parent.mkdir(parents=True)
    # The oracle read the beginning of the text; its replies have the hash of what it read.
    labels[0]["text_sha256"] = "ab" * 32
    shard.write_text(json_lines(labels) + '{"torn')
    ledger = run.tree.answers / "train-shard_2.jsonl"
    reply = {"text_sha256": "ab" * 32, "request_digest": "c", "attempt": 0, "body": GONE[:200]}
    earlier = {"text_sha256": "ab" * 32, "request_digest": "d", "label": {"raw": GONE[:200]}}
    other = {**reply, "text_sha256": "cd" * 32, "body": "stays"}
    ledger.parent.mkdir()
    ledger.write_text(json_lines([reply, earlier, other]))
    assert {str(shard), str(ledger)} <= _holding(tmp_path)
    done = said(capsys, *command_of(run, path, "--apply", "--erase-labels"))
    assert done["erased"] == ["train/shard_2/scores.jsonl", "answers/train-shard_2.jsonl"]
    assert [row.get("body", row.get("label")) for row in read_rows(ledger)] == [
        *("", {"raw": ""}, "stays")
    ]
    assert str(ledger) not in _holding(tmp_path)
    assert [one["snippet"] for one in read_rows(shard)] == ["", "stays"]
    assert str(shard) not in _holding(tmp_path)
    again = said(capsys, *command_of(run, path, "--apply", "--erase-labels"))
    assert again["erased"] == []


def test_a_short_text_inside_another_document_is_found_by_its_letters(
    made: tuple[Corpus, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*_BARE][:12]
    texts: Texts = {f"doc-{i:04d}": _tokens(100 + i) for i in range(20)}
    texts["short"] = np.array([_SPACED[word] for word in words])
    texts["inside"] = np.array([*_tokens(5), *(_BARE[word] for word in words)])
    corpus = written(tmp_path / "other", texts)
    run = run_of(corpus)
    corpus.fit(num_topics=2)
    for bucket in range(BUCKETS):
        corpus.assign(bucket)
        corpus.grade(bucket, lambda i: "keep")
    _curate(run)
    path = listed(corpus, "id:short")
    said(capsys, *command_of(run, path, "--apply"))
    _curate(run)
    assert said(capsys, *command_of(run, path, "--verify"))["holds"], "its tokens are others"
    proof = said(capsys, *command_of(run, path, "--verify", "--everywhere"), status=1)
    assert {row["ingest_id"] for row in proof["shared"]} == {"inside"}
