"""Kubernetes: with `[compute.pods]` each asset of a run is made in a separate pod."""

import importlib
from typing import Any

import dagster as dg

from nmoe_core.base.errors import ConfigError
from nmoe_core.config.run import Run

# Nodes with GPUs are tainted, so that other pods leave them free.
_GPU_NODES = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def pod_tags(run: Run, stage: str) -> dict[str, Any]:
    """Tags from which dagster-k8s sets the CPUs, memory and GPUs of the pod of a step."""
    pod = getattr(run.config.compute.pods, stage, None)
    if pod is None:
        return {}
    asked = {"cpu": pod.cpu, "memory": pod.memory}
    # Kubernetes takes GPUs as a limit. A CPU limit would only slow the step down.
    limits = {"memory": pod.memory, "nvidia.com/gpu": str(pod.gpus) if pod.gpus else ""}
    resources = {
        "requests": {name: amount for name, amount in asked.items() if amount},
        "limits": {name: amount for name, amount in limits.items() if amount},
    }
    config: dict[str, Any] = {"container_config": {"resources": resources}}
    if pod.gpus:
        config["pod_spec_config"] = {"tolerations": [_GPU_NODES]}
    return {"dagster-k8s/config": config}


def executor(run: Run) -> dg.ExecutorDefinition:
    """An executor with one pod per step if `[compute.pods]` is set, else the process of the run.

    In the process of the run, steps run one after the other: a process per step would import torch
    and load the backbone again. Raises ConfigError if dagster-k8s is not installed
    (E-CONFIG-KUBERNETES).
    """
    if not run.config.compute.pods:
        return dg.in_process_executor
    try:
        return importlib.import_module("dagster_k8s").k8s_job_executor
    except ModuleNotFoundError:
        raise ConfigError(
            "dagster-k8s is not installed",
            where="[compute.pods]",
            do="pip install 'nmoe-data[kubernetes]'",
            code="E-CONFIG-KUBERNETES",
        ) from None
