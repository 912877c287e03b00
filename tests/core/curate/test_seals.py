"""Summaries of topics and curation that were edited are never believed: they are made again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.base.errors import NmoeError

TOPICS = "topics/web/shard_0000/summary.json"
SHARD = "curated/web/train/shard_0000/curation.json"
SOURCE = "curated/web/train/curation.json"


def _run(corpus: Any) -> None:
    for bucket in range(2):
        corpus.assign(bucket)
        corpus.curate(bucket, order="window_fill")
    corpus.combine()


def _outputs(corpus: Any) -> dict[str, bytes]:
    return corpus.outputs(corpus.topics) | corpus.outputs(corpus.curated)


def _edits(name: str, value: dict[str, Any]) -> list[dict[str, Any]]:
    keys = [key for key in value if key not in ("source", "content_hash", "fingerprints")]
    edits = [value | {key: 1 if value[key] == 0 else 0} for key in keys]
    edits += [{key: item for key, item in value.items() if key != "content_hash"}]
    if "fingerprints" in value:
        edits += [value | {"fingerprints": value["fingerprints"] | {"topic_model": "x"}}]
    return edits


@pytest.mark.parametrize("name", [TOPICS, SHARD, SOURCE])
def test_a_summary_that_was_edited_is_made_again_with_the_same_bytes(
    graded: Any, name: str
) -> None:
    _run(graded)
    before = _outputs(graded)
    path = graded.root / name
    for edited in _edits(name, json.loads(path.read_text())):
        path.write_text(json.dumps(edited))
        _run(graded)
        assert _outputs(graded) == before, edited


@pytest.mark.parametrize(("name", "key"), [(TOPICS, "num_documents"), (SHARD, "offset")])
def test_what_reads_an_edited_summary_refuses_it(graded: Any, name: str, key: str) -> None:
    _run(graded)
    path: Path = graded.root / name
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: 7}))

    def read() -> object:
        if name == TOPICS:
            return graded.curate(0, order="window_fill")
        return graded.combine()

    with pytest.raises(NmoeError, match="content_hash"):
        read()


@pytest.mark.parametrize("name", [TOPICS, SHARD])
def test_a_summary_of_an_older_version_still_counts(graded: Any, name: str) -> None:
    _run(graded)
    path = graded.root / name
    value = json.loads(path.read_text())
    for key in ("content_hash", "schema_version"):
        del value[key]
    path.write_text(json.dumps(value))
    older = path.read_bytes()
    _run(graded)
    assert path.read_bytes() == older
