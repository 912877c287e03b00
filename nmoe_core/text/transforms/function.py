"""Changes texts by a function of your own, which runs in a process with limits.

For each text, the function returns None if it stays as it is, the new text, or a list of spans to
replace: `(start, end, replacement)`, or `(start, end, replacement, rule)`.
"""

from collections.abc import Sequence
from typing import Any

from nmoe_core.base.compute.own.function import Documents, OwnFunction
from nmoe_core.config.transforms import OwnTable
from nmoe_core.text.transforms.batch import Batch
from nmoe_core.text.transforms.edits import Edit, edits_between


class OwnTransform:
    """The transform `function`."""

    def __init__(self, table: OwnTable) -> None:
        self._function = OwnFunction(table.opened)
        self._reads = table.reads
        self._rule = table.function.partition(":")[2]

    def edits(self, batch: Batch) -> dict[int, list[Edit]]:
        """The edits of each changed text, by its number. Raises as `OwnFunction.rows`."""
        ids = [f"{batch.source}, record {ingest_id}" for ingest_id in batch.ids]
        columns = {name: batch.columns[name] for name in self._reads}
        documents = Documents(batch.texts, ids, [batch.source] * len(ids), columns)
        found = self._function.rows(documents, self._parsed)
        return {i: edits for i, edits in enumerate(found) if edits}

    def _parsed(self, returned: Any, texts: Sequence[str]) -> list[list[Edit]]:
        if not isinstance(returned, list) or len(returned) != len(texts):
            raise ValueError(f"not a list with one item for each of {len(texts)} texts")
        return [self._edits(text, item) for text, item in zip(texts, returned)]

    def _edits(self, text: str, item: Any) -> list[Edit]:
        if item is None:
            return []
        if isinstance(item, str):
            item.encode()  # raises ValueError for half a surrogate pair
            return edits_between(text, item, self._rule)
        found: list[Edit] = []
        last = 0
        for span in item:
            start, end, replacement, *rules = span
            rule = rules[0] if rules else self._rule
            kinds = [*map(type, (start, end, replacement, rule))]
            if kinds != [int, int, str, str] or len(rules) > 1:
                raise ValueError(f"{span} is not [start, end, replacement] or [..., rule]")
            if not last <= start <= end <= len(text):
                raise ValueError(f"the span {start} to {end} overlaps, or is outside of the text")
            (replacement + rule).encode()  # as above
            if text[start:end] != replacement:
                found.append(Edit(start, end, rule, replacement))
            last = end
        return found
