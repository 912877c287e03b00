"""The tables of `[compute]`. The text below a field becomes its help."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nmoe_core.base.strict import StrictModel


class RayTable(StrictModel):
    """`[compute.ray]`: the cluster, and the resources of one item; only grading uses GPUs."""

    address: str = ""
    """Address of the cluster; empty: `RAY_ADDRESS`, or if that is not set, a new Ray on this
    machine."""
    cpus_per_task: float = Field(default=1.0, gt=0)
    """Number of CPUs per item."""
    gpus_per_task: float = Field(default=0.0, ge=0)
    """Number of GPUs per item; Ray makes only these visible to it."""
    max_retries: int = Field(default=3, ge=0)
    """Number of retries of an item after its worker or its node was lost."""


class PodTable(StrictModel):
    """`[compute.pods.STAGE]`: resources of the pod of an asset; if a value is empty, the default of
    Kubernetes applies."""

    cpu: str = Field(default="", pattern=r"^(\d+(\.\d+)?|\d+m)?$")
    """CPUs that the pod requests, such as 4 or 500m."""
    memory: str = Field(default="", pattern=r"^(\d+(\.\d+)?([KMGT]i?)?)?$")
    """Memory request and limit of the pod, such as 16Gi."""
    gpus: int = Field(default=0, ge=0)
    """Number of GPUs of the pod (`nvidia.com/gpu`)."""


class PodsTable(StrictModel):
    """`[compute.pods]`: if this table has any table STAGE, each asset of a run gets its own pod.
    STAGE is the tag `stage` of the asset: prep, label, heads, grade, curate or plan."""

    prep: PodTable | None = None
    label: PodTable | None = None
    heads: PodTable | None = None
    grade: PodTable | None = None
    curate: PodTable | None = None
    plan: PodTable | None = None


class ComputeTable(StrictModel):
    """`[compute]`: where work runs; the output does not depend on it."""

    backend: Literal["pool", "ray"] = "pool"
    """Backend: processes of this machine, or a Ray cluster, which works on as many shards at once
    as it has resources for."""
    workers: int = Field(default=1, ge=1, le=4096)
    """Number of shards that the pool grades, assigns topics to or curates in parallel, and of
    processes that compute the states of labelled documents on a CPU; prep has a separate number of
    workers."""
    ray: RayTable = RayTable()
    pods: PodsTable | None = None

    def for_work(self, *, workers: int | None = None, gpus: bool = False) -> ComputeTable:
        """This table for one kind of work: with the number of workers of this work, and with GPUs
        only if the work uses them."""
        ray = self.ray if gpus else self.ray.model_copy(update={"gpus_per_task": 0.0})
        return self.model_copy(update={"workers": workers or self.workers, "ray": ray})
