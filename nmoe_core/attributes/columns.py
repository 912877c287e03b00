"""The columns of attributes; this module imports no compiled code."""

from collections.abc import Sequence

import pyarrow as pa

NGRAMS = (2, 3, 4, 5, 6, 7, 8, 9, 10)
"""Sizes of n-grams. The first three measure the most frequent n-gram, the others all repeated
n-grams."""
COUNTS = (
    *("n_chars", "n_words", "n_symbol_words", "n_stop_words", "n_lines", "n_newlines"),
    *("n_paragraphs", "n_sentences", "n_c4_sentences"),
)
SHARES = (
    *("mean_word_chars", "hashes_per_word", "ellipses_per_word", "alphabetic_words"),
    *("bullet_lines", "ellipsis_lines", "ended_lines", "short_lines", "c4_lines"),
    *("refinedweb_cut_words", "dup_lines", "dup_line_chars", "dup_paragraphs"),
    *("dup_paragraph_chars", *(f"{'top' if n < 5 else 'dup'}_{n}gram_chars" for n in NGRAMS)),
)
FLAGS = {"has_lorem_ipsum": "lorem ipsum", "has_curly_bracket": "{"}
PERSONAL = ("n_emails", "n_ips", "n_cards", "n_ibans", "n_phones")
FINAL = "final"  # the layer after the final norm
NUM_BANDS = 16  # number of bands of a signature; each band has seven hashes
NUM_HASHES = 7 * NUM_BANDS
SCHEMAS = {
    "signals": pa.schema(
        [
            *(pa.field(name, pa.int64(), nullable=False) for name in COUNTS),
            *(pa.field(name, pa.float32(), nullable=False) for name in SHARES),
            *(pa.field(name, pa.bool_(), nullable=False) for name in FLAGS),
        ]
    ),
    "language": pa.schema(
        [
            pa.field("lang", pa.string(), nullable=False),  # ISO 639-1, or `und`
            pa.field("lang_score", pa.float32()),  # score of the detector, 0 to 1; null if not run
        ]
    ),
    "contamination": pa.schema(
        [
            pa.field("contamination", pa.float32(), nullable=False),  # share of words, 0 to 1
            # the evaluation set that contains most of these words
            pa.field("contaminated_by", pa.string()),
        ]
    ),
    "pii": pa.schema([pa.field(name, pa.int32(), nullable=False) for name in PERSONAL]),
    "perplexity": pa.schema(
        [
            pa.field("bits_per_byte", pa.float32()),  # null without a second token
            pa.field("perplexity", pa.float32()),
            pa.field("n_predicted_tokens", pa.int32(), nullable=False),
        ]
    ),
    "embedding": pa.schema([]),  # its columns depend on the backbone
    "signatures": pa.schema(
        [
            pa.field("keys", pa.binary(8 * NUM_BANDS), nullable=False),
            pa.field("sketch", pa.binary(NUM_HASHES), nullable=False),
        ]
    ),
    "duplicates": pa.schema(
        [
            pa.field("is_survivor", pa.bool_(), nullable=False),
            pa.field("exact_of", pa.string()),  # {source}//{ingest id} of the kept document
            pa.field("near_of", pa.string()),
            pa.field("near_jaccard", pa.float32()),
            # for a kept document that is a part of another document
            pa.field("contained_in", pa.string()),
            pa.field("containment", pa.float32()),
            # for a kept document, if repeated passages are searched for: share of tokens that
            # earlier kept documents have, the one that has most of them, and its share
            pa.field("repeated_share", pa.float32()),
            pa.field("repeated_of", pa.string()),
            pa.field("repeated_of_share", pa.float32()),
        ]
    ),
}
# of `duplicates`, if [duplicates] count_copies is set
NUM_COPIES = pa.field("num_copies", pa.int32(), nullable=False)


def embedding_schema(layers: Sequence[str], pooling: str, width: int) -> pa.Schema:
    """Columns of pooled states: `layer_15_mean` for block 15, `final_mean` after the final norm."""
    kind = pa.list_(pa.float32(), width)
    names = [layer if layer == FINAL else f"layer_{layer}" for layer in layers]
    return pa.schema([pa.field(f"{name}_{pooling}", kind) for name in names])
