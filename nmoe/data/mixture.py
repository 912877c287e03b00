"""The plan of a run."""

from loader import LoaderPlan as MixturePlan
from loader import resolve_plan
from loader.plan.check import open_data
from nmoe_core.prep.pipeline import HFSource


def populate_paths(plan: MixturePlan) -> MixturePlan:
    """The plan itself, since `resolve_plan` names its files; they are opened. Raises PlanError or
    FormatError if they are not the plan's."""
    for source in plan.sources:
        open_data(plan, source)
    return plan


__all__ = ["HFSource", "MixturePlan", "populate_paths", "resolve_plan"]
