"""Source tables: a key of another kind is refused with the name of the right one."""

from __future__ import annotations

from typing import Any

import pytest

from nmoe_core.base.errors import ConfigError
from nmoe_core.base.strict import validate
from nmoe_core.sources.spec import SourceSpec

HUB = {"id": "web", "hf_dataset": "org/name"}
JSONL = {"id": "web", "kind": "jsonl", "paths": ("a.jsonl",)}


@pytest.mark.parametrize(
    ("table", "key", "value", "message"),
    [
        (JSONL, "hf_valid_split", "train[:1%]", "of kind jsonl takes valid_split, not hf_valid_"),
        (JSONL, "hf_split", "train", "of kind jsonl takes split, not hf_split"),
        (JSONL, "hf_subset", "small", "of kind jsonl does not take hf_subset"),
        (JSONL | {"kind": "files"}, "hf_dataset", "a/b", "of kind files takes paths, not hf_"),
        (HUB, "valid_split", "train[:1%]", "of kind huggingface takes hf_valid_split, not valid_"),
        (HUB, "paths", ("a",), "takes hf_dataset and hf_data_files, not paths"),
        (HUB, "sample_mb", 1.0, "of kind huggingface does not take sample_mb"),
        (HUB, "sample_seed", 42, "of kind huggingface does not take sample_seed"),
        (HUB, "exclude", (), "of kind huggingface does not take exclude"),
    ],
)
def test_a_key_of_another_kind_is_refused(
    table: dict[str, Any], key: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigError, match="source 'web'") as caught:
        validate(SourceSpec, table | {key: value}, "mixture")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("id", "a-b"),
        ("id", "a.b"),
        ("id", ""),
        ("id", "web\n"),
        ("text_field", ""),
        ("sample_mb", 1e10),
        ("sample_mb", float("inf")),
    ],
)
def test_a_value_out_of_range_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        validate(SourceSpec, JSONL | {key: value}, "mixture")


def test_data_files_are_one_name_or_several() -> None:
    for names in ("a.parquet", ("a.parquet", "b.parquet")):
        assert validate(SourceSpec, HUB | {"hf_data_files": names}, "m").hf_data_files == names
