"""Finds the slices whose documents have no labels yet, and what their labels would cost."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from nmoe_core.base.errors import LabelError, NmoeError
from nmoe_core.config.run import Run
from nmoe_core.labels.cost import Estimate
from nmoe_core.labels.jobs import labelling_of
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks.graph import graded, prepared
from nmoe_core.tasks.graph.require import require_inputs

NOTHING = Estimate(0, 0, 0, None)


@dataclass(frozen=True, slots=True)
class NewLabels:
    """What labelling would ask about new documents.

    Attributes:
        slices: The questions of each slice, in the order of the slices.
        total: The questions of all these slices.
        waits: Why these slices cannot be labelled now; empty if they can be.
    """

    slices: Mapping[str, Estimate] = field(default_factory=dict)
    total: Estimate = NOTHING
    waits: str = ""

    @property
    def size(self) -> str:
        """The number of questions and their cost, in parentheses; empty without questions."""
        if not self.total.questions:
            return ""
        cost = "" if self.total.cost is None else f", about {self.total.cost:,.2f}"
        return f" ({self.total.questions:,} questions{cost})"


def new_labels(run: Run) -> NewLabels:
    """The slices with documents that have no labels. Combines the slices of the sources and draws
    the sample, as labelling does. Asks the oracle nothing and does not need its key.

    Labels that were made with other settings are not new: they are made by hand, since a setting
    may be changed by mistake and each label costs money.
    """
    sources = [source.name for source in run_sources(run)]
    try:
        for source in sources:
            look = prepared.slices(run, source)
            if look.then is None or look.changes():
                return NewLabels(waits=f"{source}/docid_slices are not current")
        require_inputs(run, "label", sources)
        labelling = labelling_of(run).without_key()
        jobs = {job.name: job for job in labelling.slice_jobs(sources)}
        due = []
        for name, looks in graded.labels(run):
            changes = [c for look in looks if look.then is not None for c in look.changes()]
            settings = [change for change in changes if change.kind not in ("input", "files")]
            if settings:
                return NewLabels(waits=f"labels have other settings: {settings[0]}")
            is_missing = any(look.then is None for look in looks)
            if is_missing or any(change.kind == "input" for change in changes):
                due.append(name)
        found = dict(labelling.estimate(jobs[name] for name in due))
    except (NmoeError, OSError) as error:
        return NewLabels(waits=" ".join(str(error).split()))
    total = found.pop("all")
    try:
        labelling.require_budget([jobs[name] for name in due])
    except LabelError as error:
        return NewLabels(found, total, " ".join(str(error).split()))
    return NewLabels(found, total)
