"""What the project depends on: pins with hashes, licences, the bill of materials."""

import json
import platform
import re
import runpy
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name

from tests.project import REPOSITORY

pytest.importorskip("cyclonedx", reason="the extra `dev`, which `make test` installs, has it")

LOCK = runpy.run_path(str(REPOSITORY / ".ci" / "make_lock.py"))
LOCKED = {package.name: package for package in LOCK["locked"]()}
KNOWN = tomllib.loads((REPOSITORY / "docs" / "licences.toml").read_text())
INSTALLED: dict[str, dict[str, Any]] = {
    canonicalize_name(one.name): one.metadata.json for one in distributions()
}
FOR_ITS_MACHINE = pytest.mark.skipif(
    (sys.platform, platform.machine(), sys.version_info[:2]) != ("linux", "x86_64", (3, 11)),
    reason="the lock is for Linux on x86-64 with Python 3.11",
)


def test_the_lock_has_every_pin_with_its_hash() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    assert {name: package.version for name, package in LOCKED.items()} == dict(map(tuple, pins))
    without = {name for name, package in LOCKED.items() if package.sha256 is None}
    assert without == {"torch", "triton"}  # builds for a machine's devices
    lines = (REPOSITORY / "requirements.lock").read_text().splitlines()
    packages = [line for line in lines if not line.startswith("#")]
    assert all(re.match(r"\S+==\S+ --hash=sha256:[0-9a-f]{64} # ", line) for line in packages)
    assert len(packages) == len(LOCKED) - len(without)


@FOR_ITS_MACHINE
@pytest.mark.parametrize("extra", LOCK["extras"]())
def test_the_lock_has_every_package_that_an_extra_needs(extra: str) -> None:
    needed = LOCK["needed"](LOCK["extras"]()[extra], INSTALLED)
    assert needed - LOCKED.keys() == set()
    labels = {"tests"} if extra in LOCK["FOR_TESTS"] else {extra, "always"}
    if extra not in ("all", *LOCK["FOR_TESTS"]):
        assert [name for name in needed if not labels & {*LOCKED[name].needed_by}] == []


@pytest.mark.slow
@FOR_ITS_MACHINE
def test_the_lock_is_what_pip_finds_by_these_hashes() -> None:
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    lock = ["--no-deps", "--require-hashes", "-r", str(REPOSITORY / "requirements.lock")]
    subprocess.run([*pip, *lock], check=True)


def test_every_dependency_has_a_compatible_licence_or_is_named_with_the_reason() -> None:
    refused = {
        name
        for name, package in LOCKED.items()
        if not LOCK["is_compatible"](package.licence, KNOWN["compatible"])
    }
    carry_more = {"imageio-ffmpeg"}  # than their metadata states
    assert refused | carry_more == KNOWN["exceptions"].keys()
    assert carry_more <= LOCKED.keys()


def test_what_is_installed_states_the_licence_that_the_lock_has() -> None:
    same = {
        name
        for name, package in LOCKED.items()
        if INSTALLED.get(name, {}).get("version", "").partition("+")[0] == package.version
    }
    assert {"numpy", "pydantic", "pytest"} <= same
    stated = {name: LOCK["licence"](INSTALLED[name]) for name in same}
    assert stated == {name: LOCKED[name].licence for name in same}


@pytest.mark.parametrize(
    ("licence", "is_compatible"),
    [
        ("MIT OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("BSD-3-Clause AND (Apache-2.0 OR GPL-2.0-only)", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("GPL-3.0-only WITH GCC-exception-3.1", False),
        ("MIT License, BSD License", True),
        ("MIT License, GNU General Public License v3 (GPLv3)", False),
        ("LicenseRef-Proprietary", False),
        ("not stated", False),
    ],
)
def test_a_licence_is_compatible_if_a_choice_that_it_leaves_is(
    licence: str, is_compatible: bool
) -> None:
    assert LOCK["is_compatible"](licence, KNOWN["compatible"]) == is_compatible


def test_the_page_has_every_dependency_with_its_licence_and_every_exception() -> None:
    page = runpy.run_path(str(REPOSITORY / "docs" / "make_dependencies.py"))["page"]()
    for name, package in LOCKED.items():
        assert f"| {name} | {package.version} | {package.licence} |" in page
    for name, reason in KNOWN["exceptions"].items():
        assert f"`{name}`: {reason}" in page


def test_the_bill_of_materials_is_valid_and_has_what_the_extras_need(tmp_path: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    for name in ("nmoe_data", "nmoe_loader"):
        (tmp_path / f"{name}-0.1.0-py3-none-any.whl").write_text(name)
    make = [sys.executable, str(REPOSITORY / ".ci" / "make_sbom.py"), str(tmp_path)]
    subprocess.run(make, check=True)
    text = (tmp_path / "nmoe-data.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    found = json.loads(text)
    product = {name for name, package in LOCKED.items() if package.needed_by != ("tests",)}
    assert found["metadata"]["component"]["name"] == "nmoe-data"
    components = {one["name"]: one for one in found["components"]}
    assert components.keys() == product | {"nmoe-loader"}
    without = {name for name, component in components.items() if "hashes" not in component}
    assert without == {"torch"}
    assert components["numpy"]["scope"] == "required"
    assert all(component["licenses"] for component in components.values())
