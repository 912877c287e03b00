"""The Helm values are YAML, name only what Dagster's chart knows, and agree with the project."""

import http.client
import importlib.util
import os
import socket
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import dagster as dg
import dagster_k8s
import pytest
import yaml
from dagster_k8s.job import get_user_defined_k8s_config

from nmoe_assets.component import build_definitions
from nmoe_core.config.run import Run
from tests.assets.server import Dagster, end
from tests.project import CONFIGS, REPOSITORY
from tests.refusals import refused

# What this project sets, each key as the values schema of the chart of Dagster 1.13 has it.
CHART = {
    "": "concurrency dagster-user-deployments dagsterDaemon dagsterWebserver "
    "generatePostgresqlPasswordSecret global postgresql retention runLauncher telemetry",
    "global": "postgresqlSecretName dagsterHome",
    "postgresql": "enabled postgresqlHost postgresqlUsername postgresqlDatabase postgresqlScheme "
    "service",
    "dagster-user-deployments": "enabled deployments",
    "dagster-user-deployments.deployments": "name image dagsterApiGrpcArgs port env envSecrets "
    "includeConfigInLaunchedRuns resources volumeMounts volumes",
    "runLauncher": "type config",
    "runLauncher.config": "k8sRunLauncher",
    "runLauncher.config.k8sRunLauncher": "imagePullPolicy loadInclusterConfig failPodOnRunFailure "
    "runK8sConfig",
    "runLauncher.config.k8sRunLauncher.runK8sConfig": "containerConfig podSpecConfig jobSpecConfig",
    "dagsterWebserver": "replicaCount",
    "dagsterDaemon": "enabled env runCoordinator runMonitoring runRetries",
    "dagsterDaemon.runCoordinator": "enabled type config",
    "dagsterDaemon.runCoordinator.config": "queuedRunCoordinator",
    "dagsterDaemon.runMonitoring": "enabled startTimeoutSeconds cancelTimeoutSeconds "
    "maxResumeRunAttempts pollIntervalSeconds freeSlotsAfterRunEndSeconds",
    "dagsterDaemon.runRetries": "enabled maxRetries retryOnAssetOrOpFailure",
    "concurrency": "enabled pools runs",
    "concurrency.pools": "granularity",
    "concurrency.runs": "maxConcurrentRuns",
    "retention": "enabled schedule sensor",
    "retention.schedule": "purgeAfterDays",
    "retention.sensor": "purgeAfterDays",
    "telemetry": "enabled",
}
CHECKED = ("", "runLauncher.config", "dagsterDaemon", "concurrency", "retention")


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / "kubernetes" / "values.yaml").read_text())


def _at(values: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """The tables at a path; a list holds several."""
    found: list[Any] = [values]
    for name in path.split(".") if path else []:
        found = [table[name] for table in found if name in table]
        found = [one for table in found for one in (table if isinstance(table, list) else [table])]
    return found


@pytest.mark.parametrize("path", CHART)
def test_only_keys_of_the_chart_are_set(values: dict[str, Any], path: str) -> None:
    tables = _at(values, path)
    assert tables, "the table is checked because it is set"
    for table in tables:
        assert set(table) <= set(CHART[path].split())
        inner = {f"{path}.{name}".strip(".") for name in table if isinstance(table[name], dict)}
        assert path not in CHECKED or inner <= set(CHART), "every table that is set is checked"


def test_the_code_location_is_this_project_and_runs_see_its_data(values: dict[str, Any]) -> None:
    [deployment] = _at(values, "dagster-user-deployments.deployments")
    flag, module = deployment["dagsterApiGrpcArgs"]
    assert flag == "-m"
    assert importlib.util.find_spec(module) is not None
    assert deployment["includeConfigInLaunchedRuns"] == {"enabled": True}
    [mount] = deployment["volumeMounts"]
    assert mount["name"] in {volume["name"] for volume in deployment["volumes"]}
    environment = {entry["name"]: entry["value"] for entry in deployment["env"]}
    assert environment["NMOE_CONFIG"].startswith(mount["mountPath"])
    sources = "".join(
        path.read_text()
        for package in ("nmoe_core", "nmoe_assets")
        for path in (REPOSITORY / package).rglob("*.py")
    )
    for name in environment:
        assert name.startswith("DAGSTER_") or f'"{name}"' in sources


def test_limits_and_retention_match_the_other_configuration(values: dict[str, Any]) -> None:
    path = CONFIGS / "dagster" / "dagster.postgres.yaml"
    plain = yaml.safe_load(path.read_text())
    pools, runs = values["concurrency"]["pools"], values["concurrency"]["runs"]
    assert pools["granularity"] == plain["concurrency"]["pools"]["granularity"]
    assert runs["maxConcurrentRuns"] == plain["concurrency"]["runs"]["max_concurrent_runs"]
    for kind in ("schedule", "sensor"):
        days = plain["retention"][kind]["purge_after_days"]
        assert values["retention"][kind]["purgeAfterDays"] == days
    assert values["postgresql"]["postgresqlScheme"] == "postgresql+psycopg2"


def test_the_values_contain_no_password(values: dict[str, Any]) -> None:
    assert values["generatePostgresqlPasswordSecret"] is False
    assert "postgresqlPassword" not in values["postgresql"]
    assert values["global"]["postgresqlSecretName"]


def test_only_the_webserver_that_asks_for_a_token_runs_and_its_names_are_those_of_the_chart(
    values: dict[str, Any],
) -> None:
    assert values["dagsterWebserver"] == {"replicaCount": 0}
    deployment, service = _manifests()
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["image"] == "{repository}:{tag}".format_map(
        values["dagster-user-deployments"]["deployments"][0]["image"]
    )
    secrets = [
        entry["valueFrom"]["secretKeyRef"]["name"]
        for entry in container["env"]
        if "valueFrom" in entry
    ]
    assert secrets == ["nmoe-ui", values["global"]["postgresqlSecretName"]]
    assert container["volumeMounts"][0]["mountPath"].startswith(values["global"]["dagsterHome"])
    assert {volume["configMap"]["name"] for volume in pod["volumes"]} == {
        "nmoe-dagster-instance",
        "nmoe-dagster-workspace-yaml",
    }


def _manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CONFIGS / "kubernetes" / "webserver.yaml").read_text()))


def test_the_webserver_of_the_cluster_answers_its_hosts_to_those_who_have_the_secret(
    tmp_path: Path,
) -> None:
    [container] = _manifests()[0]["spec"]["template"]["spec"]["containers"]
    (tmp_path / "workspace.yaml").write_text("load_from: []\n")
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    changed = {"python": sys.executable, "3000": str(port), "0.0.0.0": "127.0.0.1"}
    changed["/dagster-workspace/workspace.yaml"] = "workspace.yaml"
    words: list[str] = [*container["command"], *container["args"]]
    [hosts] = [e["value"] for e in container["env"] if e["name"] == "NMOE_UI_HOSTS"]
    given = {"NMOE_UI_TOKEN": "the-secret\n", "NMOE_UI_HOSTS": hosts}
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(
            [changed.get(word, word) for word in words],
            env={**os.environ, "DAGSTER_HOME": str(tmp_path), **given},
            cwd=tmp_path,
            stdout=log,
            stderr=log,
        )

    def status(path: str = "/server_info", **headers: str) -> int:
        with suppress(OSError), closing(http.client.HTTPConnection("127.0.0.1", port)) as client:
            client.request("GET", path, headers=headers)
            answer = client.getresponse()
            cookies.append(answer.headers.get("Set-Cookie", ""))
            return answer.status
        return 0

    cookies: list[str] = []

    bearer = "Bearer the-secret"
    try:
        Dagster.wait(status, 120, "the webserver answers")
        assert status(Authorization=bearer) == 200
        assert status(Authorization=bearer, Host=hosts, Origin=f"https://{hosts}") == 200
        assert status(Authorization=bearer, Host=f"other.{hosts}") == 400
        assert status(Host=hosts) == 401
        assert status(Authorization="Bearer ", Host=hosts) == 401
        assert status(Authorization=bearer, Origin="http://other.example") == 403
        assert status("/graphql?query={version}", Authorization=bearer) == 405
        assert not any(cookies), "only the address sets one"
        assert status("/?token=the-secret", Host=hosts) == 200
        assert {"HttpOnly", "SameSite=strict"} <= set(cookies[-1].split("; "))
        assert status(Cookie=cookies[-1].partition(";")[0], Host=hosts) == 200
        assert status(Cookie=cookies[-1].partition(";")[0]) == 401, "another port or host"
    finally:
        end(server)
    assert "the-secret" not in (tmp_path / "log").read_text()


def test_a_pod_is_given_longer_to_end_than_its_workers_take(values: dict[str, Any]) -> None:
    from nmoe_core.base.compute import pool

    [config] = _at(values, "runLauncher.config.k8sRunLauncher.runK8sConfig")
    grace = config["podSpecConfig"]["terminationGracePeriodSeconds"]
    assert grace >= 4 * pool.GRACE_SECONDS
    limits = config["containerConfig"]["resources"]["limits"]
    tolerated = {one["key"] for one in config["podSpecConfig"]["tolerations"]}
    assert tolerated <= set(limits), "the taint of GPU nodes is tolerated for their GPU"


def test_pods_of_assets_get_the_resources_of_their_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"cpu": "8", "memory": "64Gi", "gpus": 2}
    settings = {"compute.pods.grade": asked, "compute.pods.prep": {"cpu": "500m"}}
    run = Run("demo", settings)
    made = build_definitions(run)
    jobs = {name: made.resolve_job_def(name) for name in ("prep", "grade", "curate")}
    grade = _resources(jobs["grade"], "stdlib__quality_scores")
    prep = _resources(jobs["prep"], "stdlib__shards")
    assert grade["limits"] == {"memory": "64Gi", "nvidia.com/gpu": "2"}
    assert grade["requests"] == {"cpu": "8", "memory": "64Gi"}
    assert prep["requests"] == {"cpu": "500m"}
    assert not any(_resources(jobs["curate"], "stdlib__curated").values())
    assert {job.executor_def.name for job in jobs.values()} == {"k8s"}

    monkeypatch.setitem(sys.modules, "dagster_k8s", None)
    with refused("E-CONFIG-KUBERNETES", r"nmoe-data\[kubernetes\]"):
        build_definitions(run)


def _resources(job: dg.JobDefinition, op: str) -> dict[str, Any]:
    """What dagster-k8s would ask of Kubernetes for the pod of an op."""
    [tags] = [node.tags for node in job.graph.node_defs if node.name == op]
    config = dagster_k8s.DagsterK8sJobConfig("nmoe", "/dagster")
    pod = dagster_k8s.construct_dagster_k8s_job(
        config, [], "step", get_user_defined_k8s_config(tags)
    ).spec.template.spec
    resources = pod.containers[0].resources
    return resources.to_dict() if resources else {}
