"""A source's table opens what it names, cut into disjoint splits, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nmoe_core.sources.paths import find_files, sample_files
from nmoe_core.sources.records import BadRecord
from tests.core.sources.read import good, opened, records
from tests.refusals import refused

ROWS = [{"text": f"text number {i}", "key": f"k{i}"} for i in range(100)]


def test_text_files_are_documents_named_by_their_path_in_the_tree(tmp_path: Path) -> None:
    for name, payload in {"b/x.md": b"bx", "a.md": b"a", "b/y.txt": b"y", "c.md": b"\xff"}.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes(payload)
    source, _ = opened(tmp_path, kind="files", paths=["tree/**/*.md"], on_error="skip")
    first, second, bad = records(source)
    assert (first.id, first.text) == ("web/a.md:0", "a")
    assert (second.id, second.text) == ("web/b/x.md:0", "bx")
    assert isinstance(bad, BadRecord)
    assert "not UTF-8 at byte 0" in bad.reason
    before = source.revision()
    (tmp_path / "tree" / "a.md").write_bytes(b"A")
    assert source.revision() != before


def test_a_sample_of_files_is_seeded_and_bounded(tmp_path: Path) -> None:
    for i in range(50):
        (tmp_path / f"{i}.txt").write_text("x" * 100)
    files = find_files(["*.txt"], tmp_path)
    assert [len(sample_files(files, size, seed=0)) for size in (99, 100)] == [0, 1]
    sample = sample_files(files, 1000, seed=1)
    assert len(sample) == 10
    assert sample == sample_files(files, 1000, seed=1)
    assert sample != sample_files(files, 1000, seed=2)
    assert sample == [f for f in files if f in sample]


@pytest.mark.parametrize("form", ["save_to_disk", "parquet"])
def test_a_local_dataset_directory_is_cut_into_disjoint_splits(tmp_path: Path, form: str) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(ROWS)
    directory = tmp_path / "hub"
    if form == "parquet":
        directory.mkdir()
        whole.to_parquet(directory / "train.parquet")
    else:
        datasets.DatasetDict({"train": whole}).save_to_disk(str(directory))
    keys = {"hf_dataset": "./hub", "hf_valid_split": "train[10%:25%]", "id_field": "key"}
    train, valid = (
        {record.id for record in good(*opened(tmp_path, split, **keys))}
        for split in ("train", "valid")
    )
    assert valid == {f"k{i}" for i in range(10, 25)}
    assert train == {f"k{i}" for i in range(100)} - valid


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"hf_dataset": "./nowhere"}, "E-SOURCE-NOTFOUND"),
        ({"hf_split": "test"}, "E-SOURCE-NOTFOUND"),
        ({"text_field": "body"}, "E-SOURCE-FIELD"),
    ],
)
def test_a_missing_directory_split_or_field_is_refused(
    tmp_path: Path, change: dict[str, Any], code: str
) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    whole.save_to_disk(str(tmp_path / "hub"))
    with refused(code):
        opened(tmp_path, **{"hf_dataset": "./hub"} | change).source.check()
