"""Datasets: the split asked for, the commit recorded, and one kind of error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nmoe_core.errors import SourceError
from nmoe_core.sources.hub import DatasetsOptions, DatasetsSource
from nmoe_core.sources.records import BadRecord, Record

datasets = pytest.importorskip("datasets")


def _local(tmp_path: Path, **options: Any) -> DatasetsSource:
    return DatasetsSource("hub", DatasetsOptions("./hub", **options), tmp_path)


def _records(source: DatasetsSource) -> list[Record | BadRecord]:
    return [record for block in source.blocks() for record in block.records()]


@pytest.mark.parametrize(("saved_as", "asked"), [("valid", "train"), (None, "valid")])
def test_a_dataset_saved_alone_has_only_its_own_split(
    tmp_path: Path, saved_as: str | None, asked: str
) -> None:
    split = datasets.NamedSplit(saved_as) if saved_as else None
    datasets.Dataset.from_dict({"text": ["a"]}, split=split).save_to_disk(str(tmp_path / "hub"))
    own = _local(tmp_path, split=saved_as or "train")
    own.check()
    assert [r.text for r in _records(own) if isinstance(r, Record)] == ["a"]
    with pytest.raises(SourceError) as caught:
        _local(tmp_path, split=asked).check()
    assert caught.value.code == "E-SOURCE-NOTFOUND"


def test_null_texts_are_empty_and_float_ids_are_bad(tmp_path: Path) -> None:
    columns = {"text": ["a", None], "score": [0.5, 1.5]}
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "hub"))
    texts = [r.text for r in _records(_local(tmp_path)) if isinstance(r, Record)]
    assert texts == ["a", ""]
    bad = _records(_local(tmp_path, id_field="score"))
    assert all(isinstance(record, BadRecord) for record in bad)


def test_check_finds_a_missing_field_before_anything_is_read(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"body": ["a"]}).save_to_disk(str(tmp_path / "hub"))
    with pytest.raises(SourceError) as caught:
        _local(tmp_path).check()
    assert caught.value.code == "E-SOURCE-FIELD"


def test_a_file_of_other_columns_is_one_error_that_names_the_row(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "a.jsonl").write_text('{"text": "a"}\n' * 600)
    (tmp_path / "hub" / "b.jsonl").write_text('{"text": {"b": 1}, "x": 1}\n')
    with pytest.raises(SourceError) as caught:
        _records(_local(tmp_path, data_files=("a.jsonl", "b.jsonl")))
    assert caught.value.code == "E-SOURCE-TORN"
    assert "./hub" in str(caught.value)
    assert "row 512" in str(caught.value)


def test_the_revision_of_a_directory_does_not_depend_on_the_split(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "hub"))
    revisions = {_local(tmp_path, split=split).revision() for split in ("train", "valid")}
    assert len(revisions) == 1
    assert _local(tmp_path, subset="small").revision() not in revisions


def test_what_is_read_from_the_hub_is_the_commit_that_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    commits = iter(("c1", "c2"))

    def dataset_info(_: object, dataset: str, revision: str | None) -> SimpleNamespace:
        asked.append((dataset, revision))
        return SimpleNamespace(sha=next(commits))

    def load_dataset(dataset: str, **options: Any) -> Any:
        asked.append((dataset, options["revision"]))
        return datasets.Dataset.from_dict({"text": ["a"]})

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = DatasetsSource("hub", DatasetsOptions("org/name", revision="main"), tmp_path)
    before = source.revision()
    assert len(_records(source)) == 1
    assert source.revision() == before
    assert asked == [("org/name", "main"), ("org/name", "c1")]


@pytest.mark.parametrize("library", [True, False])
def test_a_hub_that_does_not_answer_is_a_network_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: bool
) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    failure = HfHubHTTPError.__bases__[0]("no answer") if library else ConnectionError("no answer")

    def dataset_info(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    source = DatasetsSource("hub", DatasetsOptions("org/name"), tmp_path)
    for read in (source.revision, source.check):
        with pytest.raises(SourceError) as caught:
            read()
        assert caught.value.code == "E-SOURCE-NETWORK"
        assert "org/name" in str(caught.value)
