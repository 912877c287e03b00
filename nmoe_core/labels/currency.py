"""Whether labels are of the documents that are there now.

Labels name the content of the sources that their documents were read from. A record that was edited
since then moves the token spans, and so the ids, of documents behind it: a head trained on labels
of before would read other texts than the oracle was shown.
"""

from __future__ import annotations

from pathlib import Path

from nmoe_core.base.errors import LabelError
from nmoe_core.labels.files import SUMMARY_NAME, read_summary
from nmoe_core.labels.slices import data_digest, former_data_digest


def require_current_labels(labels_dir: Path, split: str, data_root: Path) -> None:
    """Refuse labels of a split that were made of other documents than those under `data_root`.

    Labels of JSON lines name no sources of shards; they are taken as they are.

    Raises:
        LabelError: E-LABEL-STALE, for the first such shard of labels; its summary was changed
            after it was written (E-LABEL-CORRUPT).
        FormatError: One of the sources is not there any more.
    """
    digests: dict[tuple[str, ...], str] = {}  # the shards of a split are mostly of the same sources
    for summary in sorted((labels_dir / split).glob(f"shard_*/{SUMMARY_NAME}")):
        value = read_summary(summary)
        made_from = (value.get("fingerprints") or {}).get("data")
        sources = tuple(sorted(value.get("per_source") or {}))
        if made_from is None or not sources:
            continue
        if sources not in digests:
            digests[sources] = data_digest(data_root, sources)
        found = digests[sources]
        if made_from != found and made_from != former_data_digest(data_root, sources):
            raise LabelError(
                "labels are of documents that have changed since",
                where=summary.parent,
                found=f"data {found}",
                expected=f"{made_from}, which was labelled",
                do="label again: job label, or nmoe hydra slices and oracle-label; then train",
                code="E-LABEL-STALE",
            )
