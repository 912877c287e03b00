"""Evaluation sets from files of every kind and from the hub give the same strings."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

pytest.importorskip("numba")

from nmoe_core.attributes.contamination import Evaluations, contamination
from nmoe_core.config.attributes import HubSet
from nmoe_core.sources.forms.strings import set_revision, set_strings
from nmoe_core.tasks.attributes import evaluations_made_with, open_attribute
from tests.project import json_lines, write_project
from tests.refusals import refused

QUESTION = "Which of the four rivers carried the old bridge away in the night of the great flood?"
ROWS = [
    {"id": 1, "question": QUESTION, "answers": {"text": ["the Oder", "the  Elbe!"], "at": [3, 9]}},
    {"id": 2, "question": "Who wrote Dune?", "answers": {"text": ["Frank Herbert"], "at": [0]}},
]
STRINGS = [QUESTION, "the Oder", "the  Elbe!", "Who wrote Dune?", "Frank Herbert"]
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@pytest.mark.parametrize("suffix", PACK)
def test_json_lines_are_read_whatever_compresses_them(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"set.jsonl{suffix}").write_bytes(PACK[suffix](json_lines(ROWS).encode()))
    assert [*set_strings(f"set.jsonl{suffix}", tmp_path)] == STRINGS


def test_files_of_a_pattern_are_one_set_of_parquet_and_arrow(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(str(tmp_path / "b.arrow"), table.schema) as file:
        file.write_table(table)
    assert [*set_strings("*.{parquet,arrow}", tmp_path)] == 2 * STRINGS
    before = set_revision("*.{parquet,arrow}", tmp_path)
    pq.write_table(table.slice(1), tmp_path / "a.parquet")
    assert set_revision("*.{parquet,arrow}", tmp_path) != before


def test_a_directory_with_the_layout_of_the_hub_is_read_by_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    splits = {
        "train": datasets.Dataset.from_list(ROWS[1:]),
        "test": datasets.Dataset.from_list(ROWS),
    }
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "quiz"))
    assert [*set_strings(HubSet(hf_dataset="quiz"), tmp_path)] == STRINGS
    other = HubSet(hf_dataset="quiz", hf_split="train")
    assert [*set_strings(other, tmp_path)] == STRINGS[3:]
    before = set_revision(other, tmp_path)
    datasets.DatasetDict(splits | {"train": splits["test"]}).save_to_disk(str(tmp_path / "quiz"))
    assert set_revision(other, tmp_path) != before


def test_a_set_of_the_hub_is_read_at_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    from tests.core.sources.test_hub import Hub

    hub = Hub(tmp_path, monkeypatch)
    hub.commit = "c" * 40
    pq.write_table(pa.Table.from_pylist(ROWS), hub.repository / "test.parquet")
    named = HubSet(hf_dataset="org/name", hf_revision=hub.commit)
    assert [*set_strings(named, tmp_path)] == STRINGS
    assert hub.downloaded == ["test.parquet"]
    monkeypatch.undo()
    assert set_revision(named, tmp_path)  # asks no hub
    with refused("E-CONTAMINATION-SET", naming=["hf_revision"]):
        set_revision(HubSet(hf_dataset="org/name"), tmp_path)


def test_short_strings_are_matched_whole_if_that_is_asked_for() -> None:
    texts = pa.array(
        ["He asked: WHO  wrote “Dune”?", "Who wrote the novel Dune?", "By Frank\nHerbert."],
        pa.large_string(),
    )

    def owners(min_words: int) -> list[str | None]:
        evaluations = Evaluations.of({"quiz": STRINGS}, min_words)
        return contamination(texts, evaluations).column("contaminated_by").to_pylist()

    assert owners(8) == [None, None, None]
    assert owners(3) == ["quiz", None, None]
    assert owners(2) == ["quiz", None, "quiz"]
    assert Evaluations.of({"quiz": STRINGS}, 3).facts["short_strings"] == 3
    assert Evaluations.of({"quiz": STRINGS}, 2).facts["short_strings"] == 0


def test_a_run_reads_sets_of_both_kinds_and_counts_words_as_it_says(tmp_path: Path) -> None:
    (tmp_path / "set.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROWS[1]).encode()))
    tables = {
        "attributes": {"use": ["contamination"]},
        "contamination": {"evaluations": {"quiz": "set.jsonl.gz"}, "min_words": 2},
    }
    run = write_project(tmp_path, [], tables).run
    attribute = open_attribute(run, "contamination")
    assert attribute.facts == {"evaluation_strings": 2, "short_strings": 0}
    assert evaluations_made_with(run)["min_words"] == "2"
    named = {"contamination.evaluations": {"hub": {"hf_dataset": "org/name"}}}
    with refused("E-CONTAMINATION-SET"):
        open_attribute(run.with_settings(named), "contamination")
