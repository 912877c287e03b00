"""Names of clusters as pictures write them."""

from __future__ import annotations

from collections.abc import Sequence

_LAST_DRAWN = 0x052F  # Latin, Greek and Cyrillic: what the font of the pictures has


def cluster_name(cluster: int, terms: Sequence[Sequence[str]], num_chars: int = 26) -> str:
    """`7 import, class`: the number and as many typical words as fit."""
    name = str(cluster)
    words = terms[cluster] if cluster < len(terms) else ()
    for word in words:
        if all(ord(letter) <= _LAST_DRAWN for letter in word):
            longer = f"{name}, {word}" if name != str(cluster) else f"{name}  {word}"
            if len(longer) > num_chars:
                break
            name = longer
    return name
