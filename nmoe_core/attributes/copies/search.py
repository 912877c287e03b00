"""The whole search for copies, as `[duplicates]` asks for it: copies of documents, then repeated
passages, then counts of copies."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from nmoe_core.attributes.copies import passages
from nmoe_core.attributes.copies.counts import with_counts, without_counts
from nmoe_core.attributes.copies.duplicates import open_shard, ranks, resolve_incremental
from nmoe_core.attributes.shared import Before, Corpus
from nmoe_core.config.attributes import DuplicatesTable
from nmoe_core.text.tokenizer import Tokenizer


def search_copies(
    corpus: Corpus,
    before: Before,
    table: DuplicatesTable,
    part_tokens: int,
    tokenizer: Callable[[], Tokenizer],
    scratch: Path,
) -> list[pa.Table]:
    """The rows of `duplicates` of each shard.

    Args:
        corpus: The signatures of all shards.
        before: Rows of an earlier search with the same settings.
        table: The settings.
        part_tokens: Tokens that are sorted at once, if passages are searched for.
        tokenizer: Opens the tokenizer of the shards, which knows the tokens of licences.
        scratch: Directory for temporary files.

    Raises:
        FormatError: As `repeated_passages`.
    """
    shards = [open_shard(rows) for rows in corpus.read()]
    if table.count_copies:
        before = before._replace(tables=[*map(without_counts, before.tables)])
    if table.repeated_tokens is None:
        given = table.priority, table.jaccard, table.contained
        tables = resolve_incremental(shards, before, *given)
    else:
        without = before._replace(tables=[passages.without_passages(t) for t in before.tables])
        tables = resolve_incremental(shards, without, table.priority, table.jaccard, None)
        chosen = passages.PassageSettings(table.repeated_tokens, part_tokens, table.count_licences)
        order = ranks(shards, tables, table.priority)
        repeated = passages.repeated_passages(corpus.shards, order, tokenizer(), chosen, scratch)
        tables = passages.with_passages(shards, tables, repeated, table.contained)
    return with_counts(shards, tables) if table.count_copies else tables
