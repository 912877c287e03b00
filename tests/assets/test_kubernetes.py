"""The Helm values are YAML, name only what Dagster's chart knows, and agree with the project."""

import copy
import functools
import http.client
import importlib.util
import json
import operator
import os
import re
import socket
import subprocess
import sys
import tomllib
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import dagster as dg
import dagster_k8s
import pytest
import yaml
from dagster_k8s.container_context import K8sContainerContext
from dagster_k8s.job import get_user_defined_k8s_config

from nmoe_assets.component import build_definitions
from nmoe_assets.pods import pod_tags
from nmoe_core.base.compute import pool
from nmoe_core.config.run import Run
from tests.assets.chart import VERSION, departures, instance_config
from tests.assets.dagster_internals import ComputeIOType, ConfigurableClassData
from tests.assets.server import Dagster, end
from tests.project import CONFIGS, REPOSITORY
from tests.refusals import refused


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / "kubernetes" / "values.yaml").read_text())


def test_the_chart_accepts_every_value(values: dict[str, Any]) -> None:
    assert list(departures(values)) == []
    assert dg.__version__.startswith(f"{VERSION}."), "the chart is that of this Dagster"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("dagsterDaemon.runMonitoring.pollSeconds", 1, "pollSeconds is not a key"),
        ("computeLogManager.type", "S3", "not one of"),
        ("concurrency.runs.maxConcurrentRuns", "8", "of another type"),
        ("dagsterDaemon.securityContext", {"dropAll": True}, "dropAll"),
    ],
)
def test_a_value_that_the_chart_does_not_know_is_named(
    values: dict[str, Any], path: str, value: Any, said: str
) -> None:
    changed = copy.deepcopy(values)
    *tables, name = path.split(".")
    functools.reduce(operator.getitem, tables, changed)[name] = value
    [found] = departures(changed)
    assert path.rpartition(".")[0] in found
    assert said in found


def test_the_code_location_is_this_project_and_reads_the_run_of_the_config_map(
    values: dict[str, Any],
) -> None:
    deployment = _deployment(values)
    flag, module = deployment["dagsterApiGrpcArgs"]
    assert flag == "-m"
    assert importlib.util.find_spec(module) is not None
    environment = {entry["name"]: entry["value"] for entry in deployment["env"]}
    [run] = [one for one in deployment["volumes"] if "configMap" in one]
    [mount] = [one for one in deployment["volumeMounts"] if one["name"] == run["name"]]
    assert Path(environment["NMOE_CONFIG"]).parent == Path(mount["mountPath"])
    sources = "".join(
        path.read_text()
        for package in ("nmoe_core", "nmoe_assets")
        for path in (REPOSITORY / package).rglob("*.py")
    )
    for name in environment:
        assert name.startswith("DAGSTER_") or f'"{name}"' in sources


def test_nothing_is_claimed_that_many_nodes_must_write() -> None:
    lines = (CONFIGS / "kubernetes" / "values.yaml").read_text().splitlines()
    text = "\n".join(line.partition("#")[0] for line in lines)
    assert "emptyDir" in text
    assert "persistentVolumeClaim" not in text


def _deployment(values: dict[str, Any]) -> dict[str, Any]:
    [deployment] = values["dagster-user-deployments"]["deployments"]
    return deployment


@pytest.fixture
def pod_of_a_run(values: dict[str, Any], tmp_path: Path) -> Any:
    """The pod that Dagster's launcher makes for a run under these values, without tags."""
    cluster = {"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "c"}}
    user = {"name": "c", "user": {"token": "t"}}
    kubeconfig = {"clusters": [cluster], "contexts": [context], "users": [user]}
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps({**kubeconfig, "current-context": "c"}))
    config = instance_config(values)["run_launcher"]
    config |= {"load_incluster_config": False, "kubeconfig_file": str(file)}
    asked = ConfigurableClassData("dagster_k8s", "K8sRunLauncher", yaml.safe_dump(config))
    launcher = asked.rehydrate(as_type=dagster_k8s.K8sRunLauncher)
    of_location = K8sContainerContext.create_from_config(_given_to_runs(_deployment(values)))
    run = dg.DagsterRun("pipeline")
    made = K8sContainerContext.create_for_run(run, launcher, False).merge(of_location)
    job = dagster_k8s.construct_dagster_k8s_job(
        made.get_k8s_job_config("nmoe-data:0.1.0", launcher), [], "run", made.run_k8s_config
    )
    return job.spec.template.spec


def _given_to_runs(deployment: dict[str, Any]) -> dict[str, Any]:
    """The container context with which the chart starts a code server."""
    if not deployment["includeConfigInLaunchedRuns"]["enabled"]:
        return {}
    return {
        "k8s": {
            "resources": deployment["resources"],
            "volumes": deployment["volumes"],
            "volume_mounts": deployment["volumeMounts"],
            "env": deployment["env"],
        }
    }


def test_a_run_gets_the_resources_that_the_values_give_runs_not_those_of_the_code_server(
    values: dict[str, Any], pod_of_a_run: Any
) -> None:
    [container] = pod_of_a_run.containers
    asked = values["runLauncher"]["config"]["k8sRunLauncher"]["resources"]
    assert container.resources.requests == asked["requests"]
    assert container.resources.limits == asked["limits"]


def test_a_run_sees_what_the_code_server_sees_and_is_no_root(
    values: dict[str, Any], pod_of_a_run: Any
) -> None:
    deployment = _deployment(values)
    [container] = pod_of_a_run.containers
    environment = {entry.name: entry.value for entry in container.env}
    for entry in deployment["env"]:
        assert environment[entry["name"]] == entry["value"]
    secrets = [source.secret_ref.name for source in container.env_from if source.secret_ref]
    assert secrets == [secret["name"] for secret in deployment["envSecrets"]]
    mounts = {mount.name: mount.mount_path for mount in container.volume_mounts}
    for mount in deployment["volumeMounts"]:
        assert mounts[mount["name"]] == mount["mountPath"]
    volumes = {volume.name for volume in pod_of_a_run.volumes}
    assert volumes >= {volume["name"] for volume in deployment["volumes"]}
    assert pod_of_a_run.security_context.run_as_non_root
    assert container.security_context.capabilities.drop == ["ALL"]
    assert pod_of_a_run.termination_grace_period_seconds >= 4 * pool.GRACE_SECONDS


def test_every_pod_runs_as_the_user_of_the_image(values: dict[str, Any]) -> None:
    [user] = re.findall(r"useradd --uid (\d+)", (REPOSITORY / "Dockerfile").read_text())
    launcher = values["runLauncher"]["config"]["k8sRunLauncher"]
    webserver = _manifests()[0]["spec"]["template"]["spec"]
    pods = [
        _deployment(values)["podSecurityContext"],
        values["dagsterDaemon"]["podSecurityContext"],
        launcher["runK8sConfig"]["podSpecConfig"]["securityContext"],
        webserver["securityContext"],
    ]
    assert {pod["runAsUser"] for pod in pods} == {int(user)}
    assert all(pod["runAsNonRoot"] for pod in pods)
    containers = [
        _deployment(values)["securityContext"],
        values["dagsterDaemon"]["securityContext"],
        launcher["securityContext"],
        webserver["containers"][0]["securityContext"],
    ]
    refused = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert containers == [refused] * 4


def test_what_a_pod_prints_is_read_from_the_bucket_by_another(
    values: dict[str, Any], s3: tuple[Any, Any], tmp_path: Path
) -> None:
    aws = pytest.importorskip("dagster_aws.s3", reason="make setup installs the extra kubernetes")
    config = instance_config(values)["compute_logs"]
    s3[0].makedirs(config["bucket"])

    def manager(pod: str) -> Any:
        here = yaml.safe_dump({**config, "local_dir": str(tmp_path / pod)})
        asked = ConfigurableClassData("dagster_aws.s3", "S3ComputeLogManager", here)
        return asked.rehydrate(as_type=aws.S3ComputeLogManager)

    key = ["run", "compute_logs", "step"]
    pod = manager("worker")
    # as the pod's own capture leaves it, but without the processes that capture needs
    local = Path(pod.local_manager.get_captured_local_path(key, "out"))
    local.parent.mkdir(parents=True)
    local.write_text("the lines of a pod that is gone\n")
    pod.upload_to_cloud_storage(key, ComputeIOType.STDOUT)
    read = manager("webserver").get_log_data(key)
    assert read.stdout == b"the lines of a pod that is gone\n"
    [log] = [name for name in s3[0].find(config["bucket"]) if name.endswith(".out")]
    assert log.startswith(f"{config['bucket']}/{config['prefix']}/")


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


def test_every_stage_has_a_pod_in_the_example_and_only_pods_with_gpus_may_use_their_nodes() -> None:
    table = tomllib.loads((CONFIGS / "kubernetes" / "pods.toml").read_text())
    pods = table["compute"]["pods"]
    run = Run("demo", {f"compute.pods.{stage}": pod for stage, pod in pods.items()})
    stages = {tags["stage"] for asset in build_definitions(run).assets for tags in _tags(asset)}
    assert stages == set(pods)
    for stage, pod in pods.items():
        config = pod_tags(run, stage)["dagster-k8s/config"]
        tolerated = [one["key"] for one in config.get("pod_spec_config", {}).get("tolerations", [])]
        assert tolerated == (["nvidia.com/gpu"] if "gpus" in pod else [])
        assert "memory" in pod, "else the limit of the run's pod holds"


def _tags(asset: Any) -> list[dict[str, str]]:
    specs = getattr(asset, "specs", ())
    return [spec.tags for spec in specs if "stage" in spec.tags]


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
