"""Task of publishing: the loader plan and all that it names, to the store of `[publish]`."""

from nmoe_core.base.result import Result
from nmoe_core.config.run import Run
from nmoe_core.publish.send import publish


def publish_plan(run: Run) -> Result:
    """Send what changed since the last publish; raises as `publish`."""
    return publish(run.tree.plan, run.config.publish.url)
