"""`nmoe sql` reads the view `documents` shard by shard, again for each scan of a query."""

from collections.abc import Callable
from typing import Any

import pytest

from nmoe_core.base.errors import FormatError
from tests.core.curate.corpus import Corpus

pa = pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")

from nmoe_core.tasks.selection import query  # noqa: E402

NUM_SHARDS = 12


@pytest.fixture
def sharded(make_corpus: Callable[..., Corpus]) -> Corpus:
    return make_corpus(num_documents=2400, num_buckets=NUM_SHARDS)


def test_a_query_holds_few_shards_at_once_and_may_scan_twice(
    sharded: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = list[int]()
    read = query.read_columns

    def counted(*given: Any) -> Any:
        held.append(pa.total_allocated_bytes())
        return read(*given)

    monkeypatch.setattr(query, "read_columns", counted)
    run = sharded.configure().with_settings({"prep.num_shards": NUM_SHARDS})
    asked = "select count(*), max(one.doc_id) from documents one where one.doc_id in"
    answer = query.query(run, f"{asked} (select doc_id from documents where shard < 3)")
    few = sorted(doc_id for bucket in range(3) for doc_id in sharded.doc_ids(bucket))
    assert answer.rows == [(len(few), few[-1])]
    assert len(held) == 2 * NUM_SHARDS
    of_shard = sum(map(len, sharded.doc_ids(0)))
    assert max(held) - held[0] < 4 * of_shard


def test_the_error_of_a_shard_is_the_error_of_the_query(sharded: Corpus) -> None:
    run = sharded.configure().with_settings({"prep.num_shards": NUM_SHARDS})
    (ids,) = {file.ids_path for file in sharded.files(7)[:1]}
    assert ids is not None
    ids.unlink()
    with pytest.raises(FormatError) as refused:
        query.query(run, "select max(doc_id) from documents")
    assert refused.value.code == "E-SHARD-IDS"
    assert query.query(run, "select count(*) from documents where shard < 7 limit 1").columns
