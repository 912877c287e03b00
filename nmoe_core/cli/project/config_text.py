"""The text of a new project's `nmoe.toml`: sources, a mixture and a flow, and settings that run."""

import json
import math
from collections.abc import Mapping, Sequence

from nmoe_core.base.jsonl import encodable
from nmoe_core.cli.project.survey import Survey
from nmoe_core.sources.discover import OUTPUT

NAME = "own"  # of the mixture and of the flow
TRAINED_SHARE = 0.25
_FIRST_TOKENS = 100_000_000  # at most these in the first run: minutes, not days
_POOLED_TOKENS = 30_000_000  # below these, workers take longer to start than to work
_TOKENS_PER_SHARD = 20_000_000
_MOST_SHARDS = 64
_SEQ_LENS = (4096, 2048, 1024, 512, 256, 128, 64)
_SEQUENCES = 4  # of the smallest source, at least
_MOST_TOPICS = 30
_PARSE_RATE = "min_parse_rate = 0.0     # the heuristic does not judge all of these languages\n"
_FEW_JUDGED = 250  # of fewer documents, too few are left to fit and to measure on
_ATTRIBUTES = ("signals", "language", "duplicates")
_DECISIONS = 'include = ["keep", "band"]   # only ["keep"] once the judges are real'
_RULE = """\
# Kept is a document of which this is true: no copy of another, and not dropped by the judges; only
# 'keep' once these are real. More clauses: n_words >= 50, lang in ('en', 'de'), dup_lines <= 0.3.
where = "is_survivor and decision in ('keep', 'band')"\
"""
_RULE_OF_JUDGED = """\
# Kept is a document of which this is true: no copy of another, and not dropped by the judges, who
# know English and source code: other languages are kept unjudged. With a real oracle, leave them
# out of the rule, and ask for 'keep'. More clauses: n_words >= 50, dup_lines <= 0.3.
where = "is_survivor and (decision in ('keep', 'band') or lang not in ('en', 'und'))"\
"""
_RULE_OF_UNSCORED = """\
# Kept is a document of which this is true: no copy of another. More clauses: n_words >= 50,
# lang in ('de', 'fr'), dup_lines <= 0.3. With a grader: decision in ('keep', 'band').
where = "is_survivor"\
"""

_HEAD = """\
# A run from documents to a loader plan, in the order of its tasks. In this directory:
#   nmoe run        makes everything that is not made yet, or was made from other inputs
#   nmoe report     what came out of it
#   nmoe ui         the same tasks in the browser
# Every key: the page Configuration of the documentation of nmoe-data, which `make docs` builds.
# Any of them for one command: --set prep.workers=8
root = "{output}"             # everything that is made lies below
flow_mode = {name}        # the section [flow.{bare}] below
# Another tokenizer is a tokenizer.json, its directory or a hub id; then drop the next two keys.
tokenizer = "o200k_harmony"
vocab_size = 201088
eos_token_id = 199999
seq_len = {seq_len}
batch_size = {batch_size}
seed = 42
on_exhaust = "wrap"      # a source of which too little is kept is read again

[prep]
num_shards = {num_shards}           # of each source; partitions in the UI
max_tokens = {max_tokens}       # in total, such as "100M"; "all" takes everything
workers = {workers}
{attributes}
# Who judges a sample of the documents. The heuristic reads text statistics, of English; a model is
#   kind = "http", with [oracle.http] base_url and model: any OpenAI-compatible server
#   kind = "engine", with [oracle.engine] checkpoint: gpt-oss weights on this machine
[oracle]
kind = "heuristic"
max_doc_tokens = 512     # the beginning of a document, which the student then reads too
replace = true           # heuristic labels cost nothing: made again when the statistics change

# Who grades all documents. The student learns the oracle's scores from n-grams, without a GPU. With
# "auto", probe and judge are trained over the backbone too, and the better grader on val is taken.
# With "none" no document is labelled or scored, and only the rule below decides.
[grading]
grader = {grader}

# A frozen model, for topics, probe and judge. `tiny` has random weights and stands in for one:
#   checkpoint = "/data/checkpoints/gpt-oss-20b"   (or a Llama or Qwen3 directory), device = "cuda"
[backbone]
kind = "tiny"

[calibration]
target_keep = 0.5        # share of documents to keep
max_false_drop = 0.15    # of the dropped, at most so many were worth keeping, with 95 % confidence

[curation]
{rule}
num_topics = {num_topics}

[checks]
min_val_documents = {min_val}
{parse_rate}
[compute]
workers = {pool}               # processes of each task: worth their start above 30M tokens

# Which sources, and how much of each: tokens_b is in 10^9 tokens. Shares follow from it.
[mixtures.{bare}]
sample_temperature = 1.0 # above 1, small sources get more than their share
"""

_FLOW = """
# How long training is: this share of the mixture, or tokens_b = 1.0 for 10^9 tokens.
[flow.{bare}]
mode = {name}
stages = ["pretrain"]
scale = {scale}
[flow.{bare}.mixture]
pretrain = {name}
"""


def project_text(surveys: Sequence[Survey], workers: int) -> str:
    """The TOML of a run over the sources that can be read; the others are in comments."""
    good = [found for found in surveys if found.problem is None]
    sizes = [found.tokens or _FIRST_TOKENS for found in good]
    documents = sum(found.documents or 0 for found in good)
    judged = sum(found.judged for found in good)
    is_partly_judged = _is_partly_judged(documents, judged)
    is_scored = _is_scored(documents, judged)
    rule = _RULE_OF_JUDGED if is_partly_judged else _RULE
    rule = rule if is_scored else _RULE_OF_UNSCORED
    least = min(sizes) * TRAINED_SHARE / _SEQUENCES
    seq_len = next((n for n in _SEQ_LENS if n <= least), _SEQ_LENS[-1])
    is_small = all(found.tokens is not None for found in good) and sum(sizes) <= _FIRST_TOKENS
    columns = any(found.languages for found in good)
    values = {
        "name": json.dumps(NAME),
        "bare": NAME,
        "output": OUTPUT,
        "seq_len": seq_len,
        "batch_size": _SEQUENCES,
        "num_shards": min(_MOST_SHARDS, max(2, math.ceil(max(sizes) / _TOKENS_PER_SHARD))),
        "max_tokens": json.dumps("all" if is_small else f"{_FIRST_TOKENS // 10**6}M"),
        "workers": workers,
        "pool": workers if sum(sizes) > _POOLED_TOKENS else 1,
        "attributes": _attributes() if columns else "",
        "rule": rule if columns else _DECISIONS,
        "num_topics": min(_MOST_TOPICS, max(2, documents // 50)) if documents else _MOST_TOPICS,
        "grader": json.dumps("student" if is_scored else "none"),
        "parse_rate": _PARSE_RATE if is_partly_judged else "",
        "min_val": min(100, max(3, judged // 60)) if documents else 100,
    }
    parts = [_HEAD.format(**values), *map(source_text, surveys)]
    flow = _FLOW.format(name=values["name"], bare=NAME, scale=TRAINED_SHARE)
    return "".join([*parts, flow])


def _is_partly_judged(documents: int, judged: int) -> bool:
    """Whether the heuristic may refuse more documents than the check allows by default."""
    return judged < 0.98 * documents


def _is_scored(documents: int, judged: int) -> bool:
    """Whether enough documents are judged to fit a grader, as far as that is known."""
    return judged >= _FEW_JUDGED or not documents


def unjudged(documents: int, judged: int) -> str:
    """A note about documents that the heuristic does not judge, or about too few documents; empty
    if neither applies."""
    if not _is_partly_judged(documents, judged):
        if _is_scored(documents, judged):
            return ""
        return (
            f"Documents are too few to fit a grader ({documents:,}, of {_FEW_JUDGED} that it "
            "takes), so [grading] names none: the rule alone decides, and keeps what is no copy."
        )
    said = "The stand-in for an oracle knows English and source code: it judges "
    said += f"{judged:,} of {documents:,} documents. "
    if not _is_scored(documents, judged):
        return said + (
            "These are too few to fit a grader, so none is named: the rule alone decides, and keeps"
            " what is no copy. With a model in [oracle], set [grading] grader."
        )
    return said + "The others are kept unless they are copies, until [oracle] names a model."


def _attributes() -> str:
    return (
        "\n# Recorded of each document: text statistics, language, near duplicates.\n"
        f"[attributes]\nuse = {json.dumps(_ATTRIBUTES)}\n"
    )


def source_text(found: Survey, mixture: str = NAME) -> str:
    """The table of a source, or a comment if it cannot be read."""
    spec = found.spec
    if found.problem is not None:
        return f"\n# {spec.id} is left out: {encodable(found.problem.line())}\n"
    lines = ["", f"# {summary(found)}"]
    if found.first_unreadable is not None:
        example = " ".join(found.first_unreadable.split())
        lines.append(f"# records that cannot be read: {found.unreadable:,}, such as {example}")
    key = mixture if mixture.isidentifier() else json.dumps(mixture)
    lines.append(f"[[mixtures.{key}.sources]]")
    table = {"id": spec.id, "tokens_b": _billions(found.tokens or _FIRST_TOKENS)}
    table |= spec.model_dump(exclude_defaults=True, exclude={"id", "tokens_b", "columns"})
    if spec.kind not in ("huggingface", "files"):
        table["text_field"] = spec.text_field
    lines += [f"{key} = {_toml(value)}" for key, value in table.items()]
    if others := [name for name in found.fields if name not in (spec.text_field, "id")]:
        lines.append(f"# columns = {_toml(others)}   # fields to keep beside the documents")
    return encodable("\n".join(lines) + "\n")


def summary(found: Survey) -> str:
    """Description of a surveyed source."""
    about = "" if found.is_whole else "about "
    parts = []
    if found.documents is not None:
        parts.append(f"{about}{found.documents:,} documents")
    if found.tokens is not None:
        parts.append(f"about {found.tokens:,} tokens")
    if found.languages:
        parts.append(languages(found.languages))
    return ", ".join(parts) or "its size is not known before it is read"


def languages(shares: Mapping[str, float], most: int = 3) -> str:
    """The most frequent languages: `en 98 %, de 2 %`."""
    shown = [f"{name} {100 * share:.0f} %" for name, share in list(shares.items())[:most]]
    more = len(shares) - len(shown)
    return ", ".join(shown) + (f", {more} more" if more > 0 else "")


def _billions(tokens: int) -> float:
    return float(f"{tokens / 1e9:.4g}")


def _toml(value: object) -> str:
    """A value as TOML: strings, lists of them and numbers are written as in JSON, but for 1e-06."""
    if isinstance(value, float):
        return f"{value:.12f}".rstrip("0")
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
