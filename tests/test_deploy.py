"""The image, compose.yaml and the systemd units name what exists, and agree with each other."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.project import CONFIGS, REPOSITORY

dg = pytest.importorskip("dagster", reason="extra dagster is not installed")
DEPLOY = REPOSITORY / "deploy"
HASHED = re.compile(r"[\w.-]+==[\w.+]+ --hash=sha256:[0-9a-f]{64}( #.*)?")
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def _instructions() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile with their arguments, in order."""
    text = (REPOSITORY / "Dockerfile").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def _stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage after its FROM, with those of the stages that it stands on."""
    stages: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for word, rest in _instructions():
        if word == "FROM":
            base, name = rest.split(" AS ")
            stages[name] = list(stages.get(base, [("FROM", base)]))
        else:
            stages[name].append((word, rest))
    return stages


def _pinned(name: str) -> dict[str, str]:
    """Versions in a lock, by package; every line is a pin with a hash."""
    lines = (REPOSITORY / name).read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith(("#", "--extra-index-url"))]
    assert [line for line in pins if not HASHED.fullmatch(line)] == []
    return dict(line.partition(" ")[0].split("==") for line in pins)


def test_the_image_has_the_python_of_the_lock_and_its_stages_exist() -> None:
    [version] = re.findall(r"with Python (\d\.\d+)", (REPOSITORY / "requirements.lock").read_text())
    stages = _stages()
    assert {one[0][1] for one in stages.values()} == {f"python:{version}-slim"}
    copied = re.findall(r"--from=(\S+)", (REPOSITORY / "Dockerfile").read_text())
    assert set(copied) <= set(stages)


def test_every_file_that_the_image_copies_is_there_and_not_ignored() -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    sources = [
        source
        for word, rest in _instructions()
        if word == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    ]
    assert "nmoe_assets" in sources
    for source in sources:
        assert (REPOSITORY / source).exists()
        assert any(Path(source).match(line[1:]) for line in ignored if line.startswith("!"))


def test_every_package_of_the_image_is_checked_against_its_hash() -> None:
    commands = [
        command
        for word, rest in _instructions()
        if word == "RUN"
        for command in rest.split("&&")
        if " install " in f" {command} " and "pip" in command
    ]
    locks = [re.findall(r"--require-hashes -r (\S+)", command) for command in commands]
    assert [*map(len, locks)].count(0) == 2, "the two that install what the image itself built"
    for command, lock in zip(commands, locks):
        assert "--no-deps" in command
        assert lock or "wheels/*.whl" in command
    named = {name for lock in locks for name in lock}
    assert named == {"image.lock", "torch-cpu.lock", "torch-cuda.lock"}
    pins = dict(
        line.split("==")
        for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    cpu = _pinned("deploy/torch-cpu.lock")
    cuda = _pinned("deploy/torch-cuda.lock")
    assert cpu == {"torch": f"{pins['torch']}+cpu"}
    assert {name: cuda[name] for name in ("torch", "triton")} == {
        name: pins[name] for name in ("torch", "triton")
    }
    assert not cuda.keys() & _pinned("requirements.lock").keys()


def test_the_image_leaves_out_only_what_tests_need_and_the_film_extra() -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    [pattern] = re.findall(r"grep -Ev '(.+)' requirements\.lock", dockerfile)
    lines = [
        line
        for line in (REPOSITORY / "requirements.lock").read_text().splitlines()
        if not line.startswith("#")
    ]
    left_out = [line for line in lines if re.search(pattern, line)]
    assert {line.rpartition("; ")[2] for line in left_out} == {"tests", "film"}
    kept = {line.partition("==")[0] for line in lines} - {
        line.partition("==")[0] for line in left_out
    }
    assert {"dagster-aws", "dagster-k8s", "dagster-postgres", "ray", "setuptools"} <= kept


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_runs_as_a_user_without_rights_and_has_the_command(target: str) -> None:
    stage = _stages()[target]
    users = [rest for word, rest in stage if word == "USER"]
    assert stage[-1] == ("USER", users[-1])
    assert users[-1].partition(":")[0] not in ("0", "root")
    [words] = [rest for word, rest in stage if word == "CMD"]
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    assert yaml.safe_load(words)[0] in scripts


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def _is_there(command: list[str]) -> bool:
    """Whether a command starts a program, or a module, that the environment has."""
    program, *rest = command
    if program == "python":
        return "-c" in rest or importlib.util.find_spec(rest[rest.index("-m") + 1]) is not None
    return bool(entry_points(group="console_scripts", name=program))


def _dagster(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: one for name, one in compose["services"].items() if name != "postgres"}


def test_compose_has_the_four_services_each_with_a_health_check(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(services) == {"postgres", "code", "daemon", "webserver"}
    for service in services.values():
        assert service["restart"] == "unless-stopped"
        assert service["healthcheck"]["test"][0] == "CMD"
        assert set(service.get("depends_on", {})) <= set(services)
    for service in _dagster(compose).values():
        assert _is_there(service["command"])
        assert _is_there(service["healthcheck"]["test"][1:])
        assert service["cap_drop"] == ["ALL"]
        assert service["pid"] == "host", "run monitoring sees the processes of runs"


def test_compose_mounts_files_that_exist_and_declares_its_volumes(compose: dict[str, Any]) -> None:
    of_the_user = {"./run.toml"}
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert source in of_the_user or (DEPLOY / source).is_file()
            else:
                assert source in compose["volumes"]
    home = {one["volumes"][0] for one in _dagster(compose).values()}
    assert home == {"home:/opt/dagster/dagster_home"}, "the UI shows logs that runs wrote"


def test_the_services_meet_at_the_addresses_of_the_workspace(compose: dict[str, Any]) -> None:
    [location] = yaml.safe_load((DEPLOY / "workspace.yaml").read_text())["load_from"]
    server = location["grpc_server"]
    command = compose["services"][server["host"]]["command"]
    assert command[command.index("-p") + 1] == str(server["port"])
    services = _dagster(compose)
    for name in ("daemon", "webserver"):
        assert "/etc/nmoe/workspace.yaml" in services[name]["command"]
    assert services["webserver"]["ports"] == ["127.0.0.1:3000:3000"]
    assert [name for name, one in compose["services"].items() if "ports" in one] == ["webserver"]


def test_compose_contains_no_secret_and_only_the_webserver_has_the_token(
    compose: dict[str, Any],
) -> None:
    for name, service in compose["services"].items():
        for key, value in service["environment"].items():
            if "PASSWORD" in key or "TOKEN" in key:
                assert value.startswith("${")
        assert ("NMOE_UI_TOKEN" in service["environment"]) == (name == "webserver")
        url = service["environment"].get("NMOE_POSTGRES_URL", ":${POSTGRES_PASSWORD:?x}@")
        assert re.search(r":\$\{POSTGRES_PASSWORD:\?[^}]+\}@", url)


def test_the_override_for_gpus_changes_only_a_service_that_exists(compose: dict[str, Any]) -> None:
    override = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text())
    assert set(override["services"]) <= set(compose["services"])


def _config(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / "dagster" / name).read_text())


def test_dagster_accepts_the_configuration_of_the_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.assets.dagster_internals import InstanceRef

    shutil.copy(CONFIGS / "dagster" / "dagster.postgres.yaml", tmp_path / "dagster.yaml")
    monkeypatch.setenv("NMOE_POSTGRES_URL", "postgresql+psycopg2://nmoe:x@127.0.0.1:1/nmoe")
    ref = InstanceRef.from_dir(str(tmp_path))
    assert type(ref.run_launcher).__name__ == "LocalRunLauncher"
    queue = ref.run_coordinator
    assert type(queue).__name__ == "QueuedRunCoordinator"
    assert queue.inst_data.config_dict == _config("dagster.yaml")["run_coordinator"]["config"]
    assert ref.custom_instance_class_data is None
    log = Path(ref.compute_log_manager.get_captured_local_path(["run"], "out"))
    assert log.is_relative_to(tmp_path)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for unit in UNITS:
        text = unit.read_text().replace("/opt/nmoe/bin/", f"{Path(sys.executable).parent}/")
        (tmp_path / unit.name).write_text(text)
    units = [str(tmp_path / unit.name) for unit in UNITS]
    done = subprocess.run(
        ["systemd-analyze", "verify", *units],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_units_start_what_exists_and_meet_at_one_socket() -> None:
    commands = {}
    for unit in UNITS:
        [line] = re.findall(r"^ExecStart=/opt/nmoe/bin/(.+)$", unit.read_text(), re.MULTILINE)
        commands[unit.stem] = line.split()
        assert _is_there(commands[unit.stem])
        for name in re.findall(r"^After=(nmoe\S+)$", unit.read_text(), re.MULTILINE):
            assert (DEPLOY / "systemd" / name).is_file()
    [location] = yaml.safe_load((DEPLOY / "systemd" / "workspace.yaml").read_text())["load_from"]
    assert location["grpc_server"]["socket"] in commands["nmoe-code"]
    assert set(commands) == {"nmoe-code", "nmoe-daemon", "nmoe-webserver"}
