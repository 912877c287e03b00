"""The proof that a plan continues another plan from a step; anyone can recompute it.

A certificate has both plans, the digest of all sources and windows before the step, and the windows
of each source that are read before and after the step. `verify_certificate` recomputes the whole
certificate from the two plans and the manifests of their data. Format: docs/formats.md.
"""

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loader.errors import FormatError, PlanError
from loader.files.addresses import as_path
from loader.files.checksummed_json import check_seal, sealed
from loader.files.format import read_json_object
from loader.plan.file import PlanFile
from loader.plan.records import LoaderPlan
from loader.rows.stream import Stream

CERTIFICATE_FORMAT = "nmoe-remix/1"
_MAX_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class SourceWindows:
    """Positions `[start, edit)` and `[edit, stop)` in a source's reading order: the windows that
    the run reads before and after the edit."""

    source: str
    content_hash: str
    start: int
    edit: int
    stop: int


@dataclass(frozen=True, slots=True)
class Certificate:
    """The proof that `after` is `before` up to a step. prefix_sha256: digest of the source and
    window of each sequence before the step. windows: one row per source of `after`."""

    step: int
    before: LoaderPlan
    after: LoaderPlan
    prefix_sha256: str
    windows: tuple[SourceWindows, ...]

    def to_json(self, directory: Path) -> str:
        """Text of the certificate's file in `directory`."""
        rows = [
            {
                "source": row.source,
                "content_hash": row.content_hash,
                "before": [row.start, row.edit],
                "after": [row.edit, row.stop],
            }
            for row in self.windows
        ]
        before = json.loads(self.before.placed_in(directory).to_json())
        after = json.loads(self.after.placed_in(directory).to_json())
        value = {
            "format": CERTIFICATE_FORMAT,
            "step": self.step,
            "sequence": self.step * self.before.batch_size,
            "prefix_sha256": self.prefix_sha256,
            "sources": rows,
            "plan_before": before,
            "plan_after": after,
        }
        return json.dumps(sealed(value), ensure_ascii=False, indent=2) + "\n"


def certify(before: LoaderPlan, after: LoaderPlan, step: int) -> Certificate:
    """Prove that `after` reads the same sequences as `before` up to a step. Raises PlanError if the
    sequences differ (E-REMIX-CERTIFICATE), and the errors of `Stream` for both plans."""
    n = step * before.batch_size
    with closing(Stream(before, "train")) as old, closing(Stream(after, "train")) as new:
        ends = f"{old.num_sequences} and {new.num_sequences} sequences"
        if before.batch_size != after.batch_size or not 0 <= n <= old.num_sequences:
            raise _refused("step", ends, f"at least {n}")
        if new.num_sequences < n + after.batch_size:
            raise PlanError(
                f"a source ends before step {step + 1} of the changed run",
                where=after.plan_id,
                found=f"{new.num_sequences} sequences",
                expected=f"at least {n + after.batch_size}: on_exhaust is 'first_exhausted'",
                do="give weight 0 to the source that has no windows left",
                code="E-PLAN-SHORT",
            )
        digests = [s.schedule.past_digest(s.source_names, n) for s in (old, new)]
        if digests[0] != digests[1]:
            raise _refused("prefix_sha256", digests[1], digests[0])
        end = new.num_sequences // after.batch_size * after.batch_size
        start = new.schedule.passed
        counts = [start, *(start + new.schedule.counts_before(at) for at in (n, end))]
    windows = (
        SourceWindows(source.name, source.content_hash, *map(int, row))
        for source, row in zip(after.sources, np.transpose(counts))
    )
    return Certificate(step, before, after, digests[0], tuple(windows))


def verify_certificate(path: str | Path) -> Certificate:
    """Read a certificate and recompute it from its plans and the manifests of their data; no token
    file is read. Raises PlanError if the result differs from the file (E-REMIX-CERTIFICATE), and
    the errors of `loader.plan.file.load_plan` for either plan."""
    path = as_path(path)
    try:
        value = read_json_object(path, _MAX_BYTES)
        check_seal(value, path, required=True, code="E-REMIX-CERTIFICATE", error=PlanError)
    except FormatError as error:
        raise _refused(path, str(error), CERTIFICATE_FORMAT) from None
    step = value.get("step")
    if value.get("format") != CERTIFICATE_FORMAT or type(step) is not int or step < 0:
        found = f"format {value.get('format')!r}, step {step!r}"
        raise _refused(path, found, CERTIFICATE_FORMAT)
    plans = [
        PlanFile(value.get(key), f"{path}: {key}", path.parent).checked()
        for key in ("plan_before", "plan_after")
    ]
    made = certify(plans[0], plans[1], step)
    expected = json.loads(made.to_json(path.parent))
    for key in expected:  # the checksum covers all other keys
        if value.get(key) != expected.get(key):
            found = repr(value.get(key))
            raise _refused(key, found[:200], repr(expected[key])[:200])
    return made


def _refused(where: object, found: str, expected: str) -> PlanError:
    return PlanError(
        "the certificate does not match its plans",
        where=where,
        found=found,
        expected=expected,
        do="create the certificate again from the two plans, or restore its file",
        code="E-REMIX-CERTIFICATE",
    )
