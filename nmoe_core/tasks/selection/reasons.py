"""Describes in words why a clause of a selection drops a document."""

import re

COPIES = "copies of other documents"
_WHOLE = {  # clauses as selections store them
    "is_survivor": COPIES,
    "(decision IN ('keep', 'band'))": "judged drop",
    "(decision IN ('keep'))": "judged drop or band",
    "(decision = 'keep')": "judged drop or band",
    "(NOT has_lorem_ipsum)": "placeholder text (lorem ipsum)",
    "(NOT has_curly_bracket)": "curly brackets",
}
_MEANINGS = {
    "n_chars": "number of characters",
    "n_words": "number of words",
    "n_stop_words": "number of the commonest English words",
    "n_c4_sentences": "number of sentences",
    "mean_word_chars": "mean length of a word in characters",
    "hashes_per_word": "number signs per word",
    "ellipses_per_word": "ellipses per word",
    "alphabetic_words": "share of words with a letter",
    "bullet_lines": "share of lines that begin with a bullet",
    "ellipsis_lines": "share of lines that end with an ellipsis",
    "ended_lines": "share of lines that end like a sentence",
    "short_lines": "share of short lines",
    "refinedweb_cut_words": "share of words in lines of page furniture",
    "dup_lines": "share of repeated lines",
    "dup_line_chars": "share of text in repeated lines",
    "dup_paragraphs": "share of repeated paragraphs",
    "dup_paragraph_chars": "share of text in repeated paragraphs",
    "contamination": "share of words in passages of evaluation sets",
    "lang": "language",
    "lang_score": "certainty of the language",
    "decision": "judged",
    "aggregated": "quality score",
    "near_jaccard": "similarity to another document",
    "containment": "share of the text that another document has",
    "repeated_share": "share of the text that earlier documents have",
    "repeated_of_share": "share of the text that one earlier document has",
}
_NGRAM = re.compile(r"(top|dup)_(\d+)gram_chars")
_OF_PRESET = re.compile(r"^\w+\.\w+: ")
_NOT = {">=": "below", ">": "at most", "<=": "above", "<": "at least", "=": "other than"}
_NOT["!="] = ""
_NUMBER = r"-?\d+(?:\.\d+)?"
_TEXT = r"'(?:[^']|'')*'"
_COMPARED = re.compile(rf'\("?(\w+)"? (>=|>|<=|<|=|!=) ({_NUMBER}|{_TEXT})\)')
_LISTED = re.compile(rf'\("?(\w+)"? IN \(((?:{_NUMBER}|{_TEXT})(?:, (?:{_NUMBER}|{_TEXT}))*)\)\)')
_EXCLUDED = re.compile(rf"\(NOT {_LISTED.pattern}\)")
_BETWEEN = re.compile(rf'\("?(\w+)"? BETWEEN ({_NUMBER}) AND ({_NUMBER})\)')


def describe_clause(clause: str) -> str:
    """Why a clause drops a document. Comparisons of columns with constants, also joined by OR, are
    put in words; any other clause is shown with NOT. The name of a clause of a preset is kept."""
    if (plain := without_preset(clause)) != clause:
        return clause.removesuffix(plain) + describe_clause(plain)
    if len(parts := _alternatives(clause)) > 1:
        failed = [*map(describe_clause, parts)]
        is_plain = not any(one.startswith("not ") for one in failed)
        return ", and ".join(failed) if is_plain else f"not {clause}"
    if clause in _WHOLE:
        return _WHOLE[clause]
    if found := _COMPARED.fullmatch(clause):
        column, compared, constant = found.groups()
        said = meaning(column), _NOT[compared], _plain(constant)
        return " ".join(filter(None, said))
    if found := _LISTED.fullmatch(clause):
        return f"{meaning(found[1])} other than {_plain(found[2])}"
    if found := _EXCLUDED.fullmatch(clause):
        return f"{meaning(found[1])} {_plain(found[2])}"
    if found := _BETWEEN.fullmatch(clause):
        return f"{meaning(found[1])} outside {found[2]} to {found[3]}"
    return f"not {clause}"


def without_preset(clause: str) -> str:
    """A clause, or its description, without the name that it has in a preset."""
    return _OF_PRESET.sub("", clause)


def _alternatives(clause: str) -> list[str]:
    """The operands of an OR; for any other clause, the clause itself."""
    inner = clause[1:-1]
    without_texts = re.sub(_TEXT, lambda text: "_" * len(text[0]), inner)
    parts = list[str]()
    depth = 0
    begin = 0
    for found in re.finditer(r"[()]| OR ", without_texts):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0 and found[0] == " OR ":
            parts.append(inner[begin : found.start()])
            begin = found.end()
    return [*parts, inner[begin:]] if parts else [clause]


def meaning(column: str) -> str:
    """A column in words, or its name if it is a column of the user's files."""
    if found := _NGRAM.fullmatch(column):
        kind = "the most frequent phrase" if found[1] == "top" else "repeated phrases"
        return f"share of text in {kind} of {found[2]} words"
    return _MEANINGS.get(column, column)


def _plain(constants: str) -> str:
    return constants.replace("''", "\0").replace("'", "").replace("\0", "'")
