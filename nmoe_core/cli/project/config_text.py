"""Writes the text of a new project's `nmoe.toml`: sources, mixture, flow and settings."""

import json
import math
from collections.abc import Mapping, Sequence

from nmoe_core.base.errors import printable
from nmoe_core.base.jsonl import encodable
from nmoe_core.cli.project.survey import Survey
from nmoe_core.sources.discover import OUTPUT
from nmoe_core.sources.records import WARC_FIELDS

NAME = "own"  # name of the mixture and of the flow
TRAINED_SHARE = 0.25
_FIRST_TOKENS = 100_000_000  # limit of tokens in the first run, which should take minutes
_POOLED_TOKENS = 30_000_000  # with fewer tokens, workers take longer to start than to work
_TOKENS_PER_SHARD = 20_000_000
_MOST_SHARDS = 1000  # definitions and ticks of fifty such sources take seconds
_SEQ_LENS = (4096, 2048, 1024, 512, 256, 128, 64)
_SEQUENCES = 4  # the smallest source must give at least so many sequences
_MOST_TOPICS = 30
_PARSE_RATE = "min_parse_rate = 0.0     # the heuristic does not judge all of these languages\n"
_FEW_JUDGED = 250  # with fewer documents, a grader cannot be fitted and measured
_ATTRIBUTES = ("signals", "language", "duplicates")
_DECISIONS = 'include = ["keep", "band"]   # only ["keep"] with a real oracle'
_RULE = """\
# A document is kept if it is not a near duplicate and the grader does not drop it. With a real
# oracle, use 'keep' alone. More clauses: n_words >= 50, lang in ('en', 'de'), dup_lines <= 0.3.
where = "is_survivor and decision in ('keep', 'band')"\
"""
_RULE_OF_JUDGED = """\
# A document is kept if it is not a near duplicate and the grader does not drop it. The heuristic
# knows English and source code, so other languages are kept whatever the grader says. With a real
# oracle, delete `or lang ...` and use 'keep' alone. More: n_words >= 50, dup_lines <= 0.3.
where = "is_survivor and (decision in ('keep', 'band') or lang not in ('en', 'und'))"\
"""
_RULE_OF_UNSCORED = """\
# A document is kept if it is not a near duplicate. More clauses: n_words >= 50,
# lang in ('de', 'fr'), dup_lines <= 0.3. With a grader: decision in ('keep', 'band').
where = "is_survivor"\
"""

_HEAD = """\
# A run from documents to a loader plan, in the order of its tasks. In this directory:
#   nmoe run        makes every output that is missing or whose inputs have changed
#   nmoe report     shows the results
#   nmoe ui         shows the same tasks in the browser
# All keys: the page Configuration of the documentation of nmoe-data, which `make docs` builds.
# To set any key for one command: --set prep.workers=8
root = "{output}"             # directory of all outputs
flow_mode = {name}        # the section [flow.{bare}] below
# Another tokenizer is a tokenizer.json, its directory or a hub id; then drop the next two keys.
tokenizer = "o200k_harmony"
vocab_size = 201088
eos_token_id = 199999
seq_len = {seq_len}
batch_size = {batch_size}
seed = 42
on_exhaust = "wrap"      # a source with too few kept tokens is read again

[prep]
num_shards = {num_shards}           # per source; a shard is a partition in the UI
max_tokens = {max_tokens}       # of all sources together, such as "100M"; "all": no limit
workers = {workers}
{attributes}
# The oracle scores a sample of the documents. The heuristic reads English text statistics; models:
#   kind = "http", with [oracle.http] base_url and model: any OpenAI-compatible server
#   kind = "engine", with [oracle.engine] checkpoint: weights on this machine
[oracle]
kind = "heuristic"
max_doc_tokens = 512     # only the first tokens of a document are scored, also by the student

# The grader scores all documents. The student learns the oracle's scores from n-grams, on CPUs.
# "auto" also trains probe and judge over the backbone, and uses the grader that is better on val.
# "none" labels and scores no document: the rule below decides alone.
[grading]
grader = {grader}

# The backbone is a frozen model for probe and judge. `tiny` is a placeholder with random weights; a
# real one instead of `kind`:
#   checkpoint = "smollm2"                         (a small one, downloaded by the first run)
#   checkpoint = "/data/checkpoints/gpt-oss-20b"   (or a Llama or Qwen3 directory), device = "cuda"
[backbone]
kind = "tiny"

[calibration]
target_keep = 0.5        # share of documents decided `keep`; the others are `band` or `drop`
max_false_drop = 0.15    # largest share of the dropped documents that were worth keeping, at 95 %

[curation]
{rule}
num_topics = {num_topics}

[checks]
min_val_documents = {min_val}
{parse_rate}
[compute]
workers = {pool}               # processes per task; more than 1 pays off above 30M tokens

# Sources, with their tokens in 10^9 (tokens_b). The shares of the mixture follow from these.
[mixtures.{bare}]
sample_temperature = 1.0 # above 1, small sources get a larger share
"""

_FLOW = """
# Length of training: a share of the mixture (scale), or tokens_b = 1.0 for 10^9 tokens.
[flow.{bare}]
mode = {name}
stages = ["pretrain"]
scale = {scale}
[flow.{bare}.mixture]
pretrain = {name}
"""


def project_text(surveys: Sequence[Survey], workers: int) -> str:
    """The TOML of a run over the sources that can be read; sources that cannot be read become
    comments."""
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
    """Whether the heuristic may leave more documents without a score than the check allows by
    default. If so, the project file relaxes the check."""
    return judged < 0.98 * documents


def _is_scored(documents: int, judged: int) -> bool:
    """Whether the heuristic scores enough documents to fit a grader; True if their number is not
    known."""
    return judged >= _FEW_JUDGED or not documents


def unjudged(documents: int, judged: int) -> str:
    """A note if the heuristic cannot score all documents, or can score too few; else empty."""
    if not _is_partly_judged(documents, judged):
        if _is_scored(documents, judged):
            return ""
        return (
            f"{documents:,} documents are too few to fit a grader (at least {_FEW_JUDGED}), so "
            '[grading] has grader = "none": the rule decides alone, and drops near duplicates.'
        )
    said = "The heuristic oracle knows English and source code: it judges "
    said += f"{judged:,} of {documents:,} documents. "
    if not _is_scored(documents, judged):
        return said + (
            'These are too few to fit a grader, so [grading] has grader = "none": the rule decides '
            "alone, and drops near duplicates. With a model in [oracle], set [grading] grader."
        )
    return said + "The others are kept unless they are near duplicates; name a model in [oracle]."


def _attributes() -> str:
    return (
        "\n# Recorded for each document: text statistics, language, near duplicates.\n"
        f"[attributes]\nuse = {json.dumps(_ATTRIBUTES)}\n"
    )


def source_text(found: Survey, mixture: str = NAME) -> str:
    """The table of a source, or a comment if it cannot be read."""
    spec = found.spec
    if found.problem is not None:
        return f"\n# {spec.id} is left out: {encodable(found.problem.line())}\n"
    lines = ["", f"# {summary(found)}"]
    if found.first_unreadable is not None:
        example = printable(" ".join(found.first_unreadable.split()))  # as TOML takes comments
        lines.append(f"# unreadable records: {found.unreadable:,}, such as {example}")
    key = mixture if mixture.isidentifier() else json.dumps(mixture)
    lines.append(f"[[mixtures.{key}.sources]]")
    table = {"id": spec.id, "tokens_b": _billions(found.tokens or _FIRST_TOKENS)}
    table |= spec.model_dump(exclude_defaults=True, exclude={"id", "tokens_b", "columns"})
    if spec.kind in ("warc", "wet"):
        table["columns"] = WARC_FIELDS
    elif spec.kind not in ("huggingface", "files", "html"):
        table["text_field"] = spec.text_field
    lines += [f"{key} = {_toml(value)}" for key, value in table.items()]
    fields = () if "columns" in table else found.fields
    if others := [name for name in fields if name not in (spec.text_field, "id")]:
        lines.append(f"# columns = {_toml(others)}   # fields to keep beside the documents")
    return encodable("\n".join(lines) + "\n")


def summary(found: Survey) -> str:
    """Describe a surveyed source in one line."""
    about = "" if found.is_whole else "about "
    parts = []
    if found.documents is not None:
        parts.append(f"{about}{found.documents:,} documents")
    if found.tokens is not None:
        parts.append(f"about {found.tokens:,} tokens")
    if found.languages:
        parts.append(languages(found.languages))
    return ", ".join(parts) or "of unknown size until it is read"


def languages(shares: Mapping[str, float], most: int = 3) -> str:
    """Format the most frequent languages: `en 98 %, de 2 %`."""
    shown = [f"{name} {100 * share:.0f} %" for name, share in list(shares.items())[:most]]
    more = len(shares) - len(shown)
    return ", ".join(shown) + (f", {more} more" if more > 0 else "")


def _billions(tokens: int) -> float:
    return float(f"{tokens / 1e9:.4g}")


def _toml(value: object) -> str:
    """Format a value as TOML: as in JSON, but floats have no exponent."""
    if isinstance(value, float):
        return f"{value:.12f}".rstrip("0")
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
