"""Resources: settings of the environment rather than of the run's TOML.

Secrets are `EnvVar`s, so the UI shows the variable's name and not its value.
"""

import functools
import json
import os
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg

from nmoe_assets.dagster_private import show_under_location
from nmoe_assets.launcher import run_is_dead
from nmoe_core.base.compute.api import kept_pools

LOCATION = "nmoe_assets.definitions"
# a tag of the runs that `dagster job execute` starts, and of the runs of a pipeline's tasks
COMMAND = "nmoe/command"
# Dagster's tag of the repository and location of a run
SHOWN_UNDER = ".dagster/repository"
WEBHOOK_VARIABLE = "NMOE_FAILURE_WEBHOOK"
COST_VARIABLE = "NMOE_USD_PER_HOUR"
_TIMEOUT_S = 10
_PAUSES_S = (1, 5)


class Notifier(dg.ConfigurableResource):
    """Sends notices to a webhook, in addition to the log.

    Attributes:
        webhook_url: Receives `{"text": ...}` by POST, the format of chat services; if it is empty,
            no notice is sent.
    """

    webhook_url: str = ""

    def send(self, text: str) -> bool:
        """Post a notice; False if no webhook is set. Raises OSError if three attempts failed."""
        if not self.webhook_url:
            return False
        request = urllib.request.Request(
            self.webhook_url,
            data=json.dumps({"text": text}).encode(),
            headers={"Content-Type": "application/json"},
        )
        for pause_s in _PAUSES_S:
            try:
                return _post(request)
            except OSError:  # OSError includes HTTP errors; no other code retries
                time.sleep(pause_s)
        return _post(request)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Turns a redirect into an HTTPError, so that a notice goes only to the configured host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _post(request: urllib.request.Request) -> bool:
    with urllib.request.build_opener(_NoRedirects).open(request, timeout=_TIMEOUT_S):
        return True


class Machine(dg.ConfigurableResource):
    """The machine of a run: its price, and the slots that its steps take in pools.

    Attributes:
        usd_per_hour: Price of the machine; 0 omits the cost from the metadata.
    """

    usd_per_hour: float = 0.0

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator["Machine"]:
        """Keep the worker processes of a step for the steps that follow in this process."""
        with kept_pools(), super().yield_for_execution(context) as machine:
            yield machine

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Free pool slots, and show the run under this location, before its first step.

        The daemon frees the slots of a run that was killed, but a job from the command line may run
        without a daemon and would wait for ever. A run from the command line has no location, so
        the page of its job and the timeline would not list it.
        """
        instance = context.instance
        run = context.run
        if instance is None or run is None:
            return
        pools = instance.event_log_storage
        for pool in pools.get_concurrency_keys():
            held = pools.get_concurrency_info(pool)
            others = held.active_run_ids | held.pending_run_ids | held.assigned_run_ids
            for other in others - {run.run_id}:
                if run_is_dead(instance, other):
                    pools.free_concurrency_slots_for_run(other)
        if run.remote_job_origin is None and instance.has_run(run.run_id):
            # The daemon must not restart this run; the user can run the command again.
            instance.add_run_tags(run.run_id, {COMMAND: "yes", "dagster/max_retries": "0"})
            _, _, location = run.tags.get(SHOWN_UNDER, "").partition("@")
            show_under_location(instance, run, location or LOCATION)

    def cost_usd(self, seconds: float) -> dict[str, float]:
        """`{"cost_usd": ...}` of this many seconds; empty if no price is set."""
        if not self.usd_per_hour:
            return {}
        return {"cost_usd": round(seconds / 3600 * self.usd_per_hour, 6)}


def resources() -> dict[str, dg.ConfigurableResource]:
    """The resources, configured by the environment."""
    has_webhook = bool(os.environ.get(WEBHOOK_VARIABLE))
    return _resources(has_webhook, float(os.environ.get(COST_VARIABLE) or 0))


@functools.cache  # Dagster merges the definitions of mixtures only if they share one object
def _resources(has_webhook: bool, usd_per_hour: float) -> dict[str, dg.ConfigurableResource]:
    return {
        "notifier": Notifier(webhook_url=dg.EnvVar(WEBHOOK_VARIABLE) if has_webhook else ""),
        "machine": Machine(usd_per_hour=usd_per_hour),
    }
