"""Published filter rules as clauses over the columns of `signals`; a preset applies only if an
expression names it: `preset('c4')`. Clauses are SQL; a selection joins them with `and`. The authors
chose the thresholds on English web text. If a rule removes lines from texts, its clause tests the
share of the text that the rule would keep.

Selections record the name of a preset, not its clauses: a changed clause needs a new version of
`select` in `CODES`.
"""

import re
from typing import NamedTuple

_COLUMN = re.compile(r"\b(?!not\b)[a-z]\w+")


class Preset(NamedTuple):
    """The clauses of one published rule, and the languages of the documents that they apply to."""

    languages: tuple[str, ...]
    """Empty: any language that separates words by spaces."""
    clauses: tuple[str, ...]

    def named(self) -> dict[str, str]:
        """The clauses by their names: a clause has the name of the first column that it reads."""
        return {_COLUMN.findall(clause)[0]: clause for clause in self.clauses}


PRESETS = {
    "gopher_quality": Preset(
        ("en",),
        (
            "n_words between 50 and 100000",
            "mean_word_chars between 3 and 10",
            "hashes_per_word <= 0.1",
            "ellipses_per_word <= 0.1",
            "bullet_lines <= 0.9",
            "ellipsis_lines <= 0.3",
            "alphabetic_words >= 0.8",
            "n_stop_words >= 2",
        ),
    ),
    "gopher_repetition": Preset(
        (),
        (
            "dup_lines <= 0.3",
            "dup_line_chars <= 0.2",
            "dup_paragraphs <= 0.3",
            "dup_paragraph_chars <= 0.2",
            *(
                f"{'top' if n < 5 else 'dup'}_{n}gram_chars <= {limit}"
                for n, limit in enumerate((0.20, 0.18, 0.16, 0.15, 0.14, 0.13, 0.12, 0.11, 0.10), 2)
            ),
        ),
    ),
    "fineweb": Preset(
        ("en",),
        (
            "ended_lines > 0.12",
            "short_lines < 0.67",
            "dup_line_chars * n_chars < 0.01 * (n_chars - n_newlines)",
            "n_newlines <= 0.3 * (n_words + n_symbol_words)",
        ),
    ),
    "c4": Preset(("en",), ("n_c4_sentences >= 3", "not has_lorem_ipsum", "not has_curly_bracket")),
    "refinedweb": Preset(("en",), ("refinedweb_cut_words <= 0.05",)),
}
