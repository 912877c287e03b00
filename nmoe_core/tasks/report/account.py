"""The account of a run: how many files, records, documents and tokens reach the batches.

A line is a total, or relates to the total above it: an amount that is subtracted (`out`), added
(`in`), or a part (`of`). The sum must equal the next total of the same unit; if not, an extra line
shows the difference.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loader.files.format import load_manifest, read_json_object
from loader.plan.build import num_windows
from loader.plan.records import LoaderPlan
from loader.plan.settings import CROPPED
from nmoe_core.base.atomic import replacing, write_json
from nmoe_core.config.run import Run
from nmoe_core.curate.shards.combine import repeats_of
from nmoe_core.prep.mixture import SourcePlan, run_sources
from nmoe_core.report.plots import flow_plot, kept_picture, png_markdown
from nmoe_core.shards.manifest import source_infos
from nmoe_core.tasks.selection.bucket_plan import bucket_paths
from nmoe_core.tasks.selection.outcome import left_out

FORMAT = "nmoe-account-v1"
NOT_ACCOUNTED = "not accounted for"
_REPEATED = "repeated by curation.repeat"


@dataclass(frozen=True, slots=True)
class Line:
    """One line. `count` is None if the files do not record it."""

    name: str
    unit: str
    kind: str
    """`total`, `out`, `in` or `of`."""
    count: int | None


def run_account(run: Run, plan: LoaderPlan) -> dict[str, Any]:
    """The account of the run with this plan, as JSON: lines for all sources together
    and per source. Raises FormatError if a source is not selected yet (E-MANIFEST-MISSING)."""
    sources = run_sources(run)
    reasons = left_out(run, [source.name for source in sources])
    by_source = {}
    for source in sources:
        of_source = {why: counts.get(source.name, 0) for why, counts in reasons.items()}
        lines = _source_lines(run, plan, source, of_source)
        by_source[source.name] = _checked(lines)
    total = [*_file_lines(run), *_summed(list(by_source.values()))]
    total += _step_lines(plan)
    return {
        "format": FORMAT,
        "plan_hash": plan.plan_hash,
        "total": [asdict(line) for line in _checked(total)],
        "sources": {name: [*map(asdict, lines)] for name, lines in by_source.items()},
    }


def commit_account(run: Run, plan: LoaderPlan) -> dict[str, Any]:
    """Return the account, and write it into the run's root unless it exists; raises as
    `run_account`."""
    account = run_account(run, plan)
    path = run.tree.account
    with replacing(path):  # the lock also removes temporary files of a killed run
        if not path.is_file() or read_json_object(path) != account:
            write_json(path, account)
    return account


def account_rows(account: dict[str, Any]) -> list[list[str | int | None]]:
    """The lines as rows of a table: name, number of all sources, number of each source. A line of
    zeros is left out, unless it is a total."""
    signs = {"total": "", "out": "- ", "in": "+ ", "of": "  of these "}
    by_source = [
        {(line["name"], line["unit"]): line["count"] for line in lines}
        for lines in account["sources"].values()
    ]
    rows = []
    for line in account["total"]:
        if line["count"] != 0 or line["kind"] == "total":
            key = (line["name"], line["unit"])
            name = signs[line["kind"]] + line["name"]
            rows.append([name, line["count"], *(counts.get(key) for counts in by_source)])
    return rows


def account_picture(run: Run, account: dict[str, Any]) -> str:
    """Markdown with the flow picture of all sources together."""
    lines = account["total"]
    kept = run.tree.picture("account")
    return kept_picture(kept, lines, lambda: png_markdown(flow_plot(lines), "account of the run"))


def _file_lines(run: Run) -> Iterator[Line]:
    """The lines of files, from the input ledger of `nmoe init`; empty without a ledger."""
    path = run.tree.input_ledger
    if not path.is_file():
        return
    ledger = read_json_object(path)
    yield Line("files seen", "files", "total", ledger["seen"]["files"])
    yield Line("left out", "files", "out", ledger["left_out"]["files"])
    yield Line("held out", "files", "out", ledger["held_out"]["files"])
    yield Line("files of training", "files", "total", ledger["taken"]["files"])


def _source_lines(
    run: Run, plan: LoaderPlan, source: SourcePlan, reasons: dict[str, int]
) -> Iterator[Line]:
    name = source.name
    data = load_manifest(run.tree.manifest(name))
    curated = load_manifest(run.tree.curated_manifest(name))
    read = _Read.of(run, name, "train")
    records = read.of_source("records_read")
    held_out: int | None = 0
    if source.has_valid and not source.spec.allow_overlap:
        held_out = _Read.of(run, name, "valid").of_source("records_read")
    both = None if records is None or held_out is None else records + held_out
    yield Line("records", "documents", "total", both)
    yield Line("held out for validation", "documents", "out", held_out)
    yield Line("records of training", "documents", "total", records)
    yield Line("cannot be read", "documents", "out", read.of_source("bad_records"))
    for reason, count in read.skipped().items():
        yield Line(reason, "documents", "out", count)
    yield Line("empty", "documents", "out", read.of_shards("empty_documents"))
    yield Line("too short", "documents", "out", read.of_shards("filtered_documents"))
    yield Line("further parts of long records", "documents", "in", read.of_shards("further_parts"))
    yield Line("documents", "documents", "total", data.total_documents)
    yield Line("cut at max_doc_tokens", "documents", "of", read.of_shards("truncated_documents"))
    for reason, count in reasons.items():
        yield Line(reason, "documents", "out", count)
    repeats = (None, None)
    if run.config.curation.repeat is not None:
        repeats = repeats_of(run.tree, name)
        yield Line(_REPEATED, "documents", "in", repeats[0])
    yield Line("curated documents", "documents", "total", curated.total_documents)
    yield Line("tokens", "tokens", "total", data.total_tokens)
    omitted = data.total_tokens - curated.total_tokens + (repeats[1] or 0)
    yield Line("of documents that are left out", "tokens", "out", omitted)
    if repeats[1] is not None:
        yield Line(_REPEATED, "tokens", "in", repeats[1])
    yield Line("curated tokens", "tokens", "total", curated.total_tokens)
    yield from _window_lines(run, plan, name)


@dataclass(frozen=True, slots=True)
class _Read:
    """Facts that prep wrote into the manifests of a split's shards; older prep wrote fewer."""

    infos: list[dict[str, Any]]

    @classmethod
    def of(cls, run: Run, name: str, split: str) -> "_Read":
        return cls(source_infos(run.tree.split(name, split)))

    def of_shards(self, key: str) -> int | None:
        """The sum of a count over the shards."""
        counts = self._counts(key)
        return sum(counts) if counts else None

    def of_source(self, key: str) -> int | None:
        """A count of the whole split; each shard records the same number."""
        counts = self._counts(key)
        return max(counts) if counts else None

    def skipped(self) -> dict[str, int]:
        """Records that the source leaves out by rule, by reason."""
        return self.infos[0].get("skipped_records", {}) if self.infos else {}

    def _counts(self, key: str) -> list[int]:
        """The count of each shard; empty unless all shards have it."""
        counts = [info[key] for info in self.infos if key in info]
        return counts if len(counts) == len(self.infos) else []


def _window_lines(run: Run, plan: LoaderPlan, name: str) -> Iterator[Line]:
    """The lines of windows of a source, summed over its buckets if the run has buckets."""
    places = {name: run.tree.curated_manifest(name)}
    if run.config.mixture.buckets.by:
        places = bucket_paths(run, name)
    taken = plan.taken()
    manifests = {one: load_manifest(path) for one, path in places.items()}
    tokens = {one: manifest.total_tokens for one, manifest in manifests.items()}
    # A bucket without a weight may be shorter than a window.
    counted = [one for one in places if one in taken or one == name]
    windows = {one: num_windows(manifests[one], plan) for one in counted}
    if unread := sum(tokens[one] for one in places if one not in windows):
        yield Line("of buckets that no stage reads", "tokens", "out", unread)
    if plan.packing in ("concat", CROPPED):
        is_cropped = plan.packing == CROPPED
        length = plan.seq_len if is_cropped else plan.stride
        why = "cropped to fill rows" if is_cropped else "after the last whole window"
        read = sum(windows.values()) * length
        yield Line(why, "tokens", "out", sum(tokens[one] for one in windows) - read)
        yield Line("tokens of windows", "tokens", "total", read)
    yield Line("windows", "windows", "total", sum(windows.values()))
    not_read = sum(max(0, count - taken[one]) for one, count in windows.items())
    again = sum(max(0, taken[one] - count) for one, count in windows.items())
    yield Line("not read", "windows", "out", not_read)
    yield Line("read again", "windows", "in", again)
    yield Line("sequences of training", "windows", "total", sum(taken[one] for one in windows))


def _step_lines(plan: LoaderPlan) -> Iterator[Line]:
    steps = plan.num_sequences // plan.batch_size
    yield Line("in no whole batch", "windows", "out", plan.num_sequences % plan.batch_size)
    yield Line("sequences of whole batches", "windows", "total", steps * plan.batch_size)
    yield Line("steps", "steps", "total", steps)


def _summed(accounts: Sequence[Sequence[Line]]) -> Iterator[Line]:
    """The sums of lines over sources. Reasons are in order of first appearance."""
    counts: dict[tuple[str, str, str], list[int | None]] = {}
    for line in (line for lines in accounts for line in lines if line.name != NOT_ACCOUNTED):
        counts.setdefault((line.name, line.unit, line.kind), []).append(line.count)
    for key, found in counts.items():
        known = [count for count in found if count is not None]
        yield Line(*key, sum(known) if len(known) == len(found) else None)


def _checked(lines: Iterator[Line] | Sequence[Line]) -> list[Line]:
    """The lines, with a line for the difference before each total that does not add up."""
    checked: list[Line] = []
    unit = ""
    left = None
    for line in lines:
        if line.kind != "total":
            sign = {"in": 1, "out": -1, "of": 0}[line.kind]
            left = None if left is None or line.count is None else left + sign * line.count
        else:
            if line.unit == unit and left is not None and line.count is not None:
                missing = left - line.count
                if missing:
                    kind = "out" if missing > 0 else "in"
                    checked.append(Line(NOT_ACCOUNTED, unit, kind, abs(missing)))
            unit = line.unit
            left = line.count
        checked.append(line)
    return checked
