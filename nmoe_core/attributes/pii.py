"""Counts personal data in each text: e-mail and IP addresses, card numbers, IBANs, telephone
numbers.

Patterns find candidates in all texts at once; card numbers and IBANs count if their check digits
are correct. IP addresses (v4 or v6) count if they are public, that is, not in a private, local,
reserved or documentation network. Four single digits that are not all equal, and numbers after a
word such as "version", are taken as version or section numbers. Repositories (git@github.com:a/b),
files (image@2x.png) and packages (libssl3@3.2.0.gz) are not e-mail addresses. Telephone numbers
need a country code (+49 30 123456, +14155552671), or an American form, (415) 555-2671 or
415-555-2671; other digit sequences are too often something else. About 500 MB/s per pattern on one
core.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nmoe_core.attributes.columns import SCHEMAS
from nmoe_core.text.transforms.personal.patterns import PATTERNS, Pattern
from nmoe_core.text.transforms.search import parts_of

SCHEMA = SCHEMAS["pii"]


def pii(texts: pa.Array) -> pa.Table:
    """Counts per text and kind, with columns as in `SCHEMA`."""
    return pa.table([_counts(texts, pattern) for pattern in PATTERNS.values()], schema=SCHEMA)


def _counts(texts: pa.Array, pattern: Pattern) -> pa.Array:
    options = pc.MatchSubstringOptions(pattern.regex)
    found = pc.call_function("count_substring_regex", [texts], options)
    counts = found.to_numpy(zero_copy_only=False).astype(np.int32)
    if pattern.is_one:
        rows = np.flatnonzero(counts)
        for row, parts in zip(rows, parts_of(texts.take(pa.array(rows)), pattern.regex)):
            counts[row] = sum(map(pattern.is_one, parts[1::2]))
    return pa.array(counts)
