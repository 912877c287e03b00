"""Checks of attribute files: complete rows, values in range, drift."""

import sys
from collections.abc import Iterable

from nmoe_core.base.errors import ConfigError
from nmoe_core.config.attributes import BUILT_IN
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.tasks.attributes import attribute_names
from nmoe_core.tasks.checks.contaminated import refuse_contaminated
from nmoe_core.tasks.checks.verdict import Verdict, Verdicts, refusal_fails

# These can exceed 1. Repeated n-grams overlap, and each counts all its characters.
_ABOVE_ONE = frozenset({f"top_{n}gram_chars" for n in (2, 3, 4)})
_ABOVE_ONE |= {"mean_word_chars", "hashes_per_word", "ellipses_per_word"}
_ABOVE_ONE |= {"bits_per_byte", "perplexity", "num_copies"}
ATTRIBUTE_CHECKS = ("rows", "ranges", "drift")


def check_attribute(run: Run, source: str, name: str, buckets: Iterable[int]) -> Verdicts:
    """The three checks of an attribute's files, for shards of a source."""
    return _check(run, name, [run.tree.shard(source, bucket) for bucket in buckets])


def check_attribute_of_all(run: Run, name: str, sources: Iterable[str]) -> Verdicts:
    """The three checks of an attribute's files, for all shards of the sources."""
    every = run.config.prep.num_shards
    return _check(run, name, [shard for one in sources for shard in run.tree.shards(one, every)])


@refusal_fails("contamination")
def check_contamination(run: Run, source: str) -> Verdicts:
    """`contamination`: at most `[contamination] max_share` of the curated tokens of a source are in
    evaluation sets."""
    found = refuse_contaminated(run, source)
    said = f"{found.share:.4%} of tokens, in {found.documents} documents"
    facts = {"share": found.share, "documents": found.documents}
    return {"contamination": Verdict(True, said, facts)}


@refusal_fails(*ATTRIBUTE_CHECKS)
def _check(run: Run, name: str, shards: list[ShardPaths]) -> Verdicts:
    """`rows`: one row per document of the current shard, in its order, with a matching digest.
    `ranges`: numbers are finite and within their limits. `drift`: few values of a column changed
    since the previous version."""
    from nmoe_core.attributes.attribute import check_attribute

    count = sum(check_attribute(shard, name) for shard in shards)
    rows = Verdict(True, f"{count} documents, one row per document", {"documents": count})
    return {"rows": rows, "ranges": _ranges(run, name, shards), "drift": _drift(run, name, shards)}


def _ranges(run: Run, name: str, shards: list[ShardPaths]) -> Verdict:
    from nmoe_core.shards.attribute_file import numbers, read_attribute

    known = attribute_names(run)
    given = run.config.checks.ranges
    if unknown := [label for label in given if label.partition(".")[0] not in known]:
        raise ConfigError(
            "unknown attribute",
            where=f"{run.path}, checks.ranges",
            found=", ".join(unknown),
            expected=f"attribute.column, of {', '.join(known)}",
        )
    left = {label for label in given if label.partition(".")[0] == name}
    problems = []
    count = 0
    for shard in shards:
        for column, values in numbers(read_attribute(shard.attribute(name))).items():
            label = f"{name}.{column}"
            low, high = given.get(label) or _range(name, column)
            outside = values[~((values >= low) & (values <= high))]  # NaN also counts as outside
            count += len(values)
            left.discard(label)
            if len(outside):
                found = f"{len(outside)} of {label} outside {low:g} to {high:g}"
                problems.append(f"{shard.name}: {found}, such as {outside[0]:g}")
    problems += [f"{label} is not a column of numbers" for label in sorted(left) if shards]
    found = problems[0] if problems else f"{count} numbers, finite and within their limits"
    return Verdict(not problems, found, {"values": count, "problems": len(problems)})


def _range(attribute: str, column: str) -> tuple[float, float]:
    """The allowed range of a column; for an attribute from the user's files, any finite number."""
    most = sys.float_info.max
    if attribute not in BUILT_IN:
        return -most, most
    is_count = column.startswith("n_") or column in _ABOVE_ONE
    return 0.0, most if is_count else 1.0


def _drift(run: Run, name: str, shards: list[ShardPaths]) -> Verdict:
    from nmoe_core.attributes.attribute import read_drift

    moved: dict[str, float] = {}
    documents = 0
    for count, shares in filter(None, (read_drift(shard.attribute(name)) for shard in shards)):
        documents += count
        for column, share in shares.items():
            moved[column] = moved.get(column, 0.0) + share * count
    if not moved:
        return Verdict(True, "no earlier version to compare with", {"drift": 0.0})
    column, total = max(moved.items(), key=lambda item: item[1])
    share = total / documents
    limit = run.config.checks.max_drift
    found = f"{share:.1%} of values of {column} changed, at most {limit:.1%} allowed"
    return Verdict(share <= limit, found, {"drift": share, "column": column})
