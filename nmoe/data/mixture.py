"""The plan of a run."""

from loader import LoaderPlan as MixturePlan
from loader import resolve_plan
from loader.plan.check import open_data
from nmoe_core.prep.pipeline import HFSource


def populate_paths(plan: MixturePlan) -> MixturePlan:
    """Opens the plan's files, to check them, and returns the plan unchanged: `resolve_plan` has
    already named the files. Raises PlanError or FormatError if a file does not match the plan."""
    for source in plan.sources:
        open_data(plan, source)
    return plan


__all__ = ["HFSource", "MixturePlan", "populate_paths", "resolve_plan"]
