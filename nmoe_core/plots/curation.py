"""What curation did to the order of shards, before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nmoe_core.plots.ordering import Sequence, draw_sequences

if TYPE_CHECKING:
    from nmoe_core.curate.shards.lineage import ArrangedDocuments


def curated_plot(documents: ArrangedDocuments, seq_len: int) -> bytes:
    """Order strips and window diversity (concat), before and after curation.

    Args:
        documents: Topics and lengths in training order, and the order they had before.
        seq_len: Tokens of a window.
    """
    was = documents.source_order
    named = {
        "before": Sequence(documents.topics[was], documents.tokens[was]),
        "after": Sequence(documents.topics, documents.tokens),
    }
    return draw_sequences(named, seq_len, "topics")
