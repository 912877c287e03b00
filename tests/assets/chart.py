"""What the values of Dagster's Helm chart may be, for the keys that this project sets.

`VALUES` says in this project's own words what the schema of the chart's values says in the chart of
Dagster 1.13: keys, types, choices, and Kubernetes objects. `departures` compares values with it.
`instance_config` is the part of the chart's dagster.yaml that these values change.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import kubernetes.client as k8s
from dagster_k8s.models import k8s_model_from_dict, k8s_snake_case_dict

VERSION = "1.13"
IMAGE = {"repository": str, "tag": str, "pullPolicy": {"Always", "IfNotPresent", "Never"}}
TICKS = {"skipped": int, "success": int, "failure": int, "started": int}
OWN_RESOURCES = {
    "podSecurityContext": k8s.V1PodSecurityContext,
    "securityContext": k8s.V1SecurityContext,
    "resources": k8s.V1ResourceRequirements,
}
VOLUMES = {"volumes": [k8s.V1Volume], "volumeMounts": [k8s.V1VolumeMount]}
ENVIRONMENT = {"env": [k8s.V1EnvVar], "envSecrets": [k8s.V1SecretEnvSource]}
VALUES: dict[str, Any] = {
    "global": {"postgresqlSecretName": str, "dagsterHome": str},
    "postgresql": {
        "enabled": bool,
        "postgresqlHost": str,
        "postgresqlUsername": str,
        "postgresqlDatabase": str,
        "postgresqlScheme": str,
        "service": {"port": int},
    },
    "generatePostgresqlPasswordSecret": bool,
    "telemetry": {"enabled": bool},
    "pythonLogs": {"pythonLogLevel": {"DEBUG", "INFO", "WARNING", "ERROR"}},
    "computeLogManager": {
        "type": {"S3ComputeLogManager"},
        "config": {
            "s3ComputeLogManager": {
                "bucket": str,
                "prefix": str,
                "skipEmptyFiles": bool,
                "uploadInterval": int,
            }
        },
    },
    "dagster-user-deployments": {
        "enabled": bool,
        "deployments": [
            {
                "name": str,
                "image": IMAGE,
                "dagsterApiGrpcArgs": [str],
                "port": int,
                "includeConfigInLaunchedRuns": {"enabled": bool},
                **ENVIRONMENT,
                **VOLUMES,
                **OWN_RESOURCES,
            }
        ],
    },
    "runLauncher": {
        "type": {"K8sRunLauncher"},
        "config": {
            "k8sRunLauncher": {
                "imagePullPolicy": IMAGE["pullPolicy"],
                "loadInclusterConfig": bool,
                "failPodOnRunFailure": bool,
                "envVars": [str],
                "envSecrets": [k8s.V1SecretEnvSource],
                **VOLUMES,
                "securityContext": k8s.V1SecurityContext,
                "resources": k8s.V1ResourceRequirements,
                "runK8sConfig": {
                    "podSpecConfig": {
                        "securityContext": k8s.V1PodSecurityContext,
                        "terminationGracePeriodSeconds": int,
                    },
                    "jobSpecConfig": {"ttlSecondsAfterFinished": int, "backoffLimit": int},
                },
            }
        },
    },
    "dagsterWebserver": {"replicaCount": int},
    "dagsterDaemon": {
        "enabled": bool,
        "image": IMAGE,
        **ENVIRONMENT,
        **OWN_RESOURCES,
        "runCoordinator": {
            "enabled": bool,
            "type": {"QueuedRunCoordinator"},
            "config": {"queuedRunCoordinator": {}},
        },
        "runMonitoring": {
            "enabled": bool,
            "startTimeoutSeconds": int,
            "cancelTimeoutSeconds": int,
            "maxResumeRunAttempts": int,
            "pollIntervalSeconds": int,
            "freeSlotsAfterRunEndSeconds": int,
        },
        "runRetries": {"enabled": bool, "maxRetries": int, "retryOnAssetOrOpFailure": bool},
    },
    "concurrency": {
        "enabled": bool,
        "pools": {"granularity": {"op", "run"}},
        "runs": {"maxConcurrentRuns": int},
    },
    "retention": {
        "enabled": bool,
        "schedule": {"purgeAfterDays": int},
        "sensor": {"purgeAfterDays": TICKS},
    },
}


def departures(values: Any, shape: Any = VALUES, where: str = "values") -> Iterator[str]:
    """What the chart would refuse, or ignore as a key that it does not have, one line each."""
    if isinstance(shape, dict) and isinstance(values, dict):
        for name, value in values.items():
            if name not in shape:
                yield f"{where}.{name} is not a key of the chart"
            else:
                yield from departures(value, shape[name], f"{where}.{name}")
    elif isinstance(shape, list) and isinstance(values, list):
        for index, value in enumerate(values):
            yield from departures(value, shape[0], f"{where}[{index}]")
    elif isinstance(shape, set):
        if values not in shape:
            yield f"{where} is {values}, not one of {sorted(shape)}"
    elif isinstance(shape, type) and shape.__module__.startswith("kubernetes."):
        try:
            k8s_model_from_dict(shape, k8s_snake_case_dict(shape, values))
        except Exception as error:  # noqa: BLE001 dagster-k8s raises it bare
            yield f"{where}: {error}"
    elif not isinstance(shape, type) or type(values) is not shape:
        yield f"{where} is {values!r}, of another type"


def instance_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """`run_launcher` and `compute_logs` of the dagster.yaml that the chart makes."""
    launcher = values["runLauncher"]["config"]["k8sRunLauncher"]
    logs = values["computeLogManager"]["config"]["s3ComputeLogManager"]
    return {
        "run_launcher": {
            "load_incluster_config": launcher["loadInclusterConfig"],
            "job_namespace": "default",
            "image_pull_policy": launcher["imagePullPolicy"],
            "service_account_name": "nmoe-dagster",
            "dagster_home": values["global"]["dagsterHome"],
            "instance_config_map": "nmoe-dagster-instance",
            "postgres_password_secret": values["global"]["postgresqlSecretName"],
            "env_secrets": [secret["name"] for secret in launcher["envSecrets"]],
            "env_vars": launcher["envVars"],
            "volume_mounts": launcher["volumeMounts"],
            "volumes": launcher["volumes"],
            "resources": launcher["resources"],
            "fail_pod_on_run_failure": launcher["failPodOnRunFailure"],
            "security_context": launcher["securityContext"],
            "run_k8s_config": {
                "pod_spec_config": launcher["runK8sConfig"]["podSpecConfig"],
                "job_spec_config": launcher["runK8sConfig"]["jobSpecConfig"],
            },
        },
        "compute_logs": {
            "bucket": logs["bucket"],
            "prefix": logs["prefix"],
            "skip_empty_files": logs["skipEmptyFiles"],
            "upload_interval": logs["uploadInterval"],
            "verify": True,
        },
    }
