"""Writes constraints.txt, and requirements.lock, which has the SHA-256 of each wheel of that set.

    .venv/bin/python .ci/make_lock.py

pip, of version 25 or later, chooses the set for the machine and the Python that this runs on, under
the constraints that are there: a package is upgraded where its line was removed before. The lock is
for Linux on x86-64 with Python 3.11. torch, whose build belongs to a machine's devices, and its
triton have no hash. Each line ends with what the package states as its licence, and with the extras
that need it.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from license_expression import get_spdx_licensing
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[1]
LOCK, CONSTRAINTS = REPOSITORY / "requirements.lock", REPOSITORY / "constraints.txt"
PROJECTS = {"nmoe-data": REPOSITORY, "nmoe-loader": REPOSITORY / "loader"}
FOR_TESTS = ("test", "test-all", "dev")
WITHOUT_HASH = ("torch", "triton")
_HEADER = """\
# The wheels of constraints.txt for Linux on x86-64 with Python 3.11, made by .ci/make_lock.py, with
# the licence that each states and the extras that need it. torch, built for a machine's devices,
# and its triton have no hash. To install them all:
#     pip install --no-deps --require-hashes -r requirements.lock
#     pip install -c constraints.txt torch triton
#     pip install --no-deps ./loader .
"""
_LINE = re.compile(
    r"(?:# )?(?P<name>[\w.-]+)==(?P<version>\S+)(?: --hash=sha256:(?P<sha256>[0-9a-f]{64}))?"
    r" # (?P<licence>.+); (?P<needed_by>.+)"
)
_SPDX = get_spdx_licensing()


@dataclass(frozen=True)
class Package:
    """A line of the lock.

    Attributes:
        sha256: Of its wheel; `None` for torch and triton.
        licence: What the package states.
        needed_by: `always`, or the extras that need it; `tests` if only tests and development do.
    """

    name: str
    version: str
    sha256: str | None
    licence: str
    needed_by: tuple[str, ...]

    @property
    def line(self) -> str:
        pin = f"{self.name}=={self.version}"
        hashed = f"{pin} --hash=sha256:{self.sha256}" if self.sha256 else f"# {pin}"
        return f"{hashed} # {self.licence}; {', '.join(self.needed_by)}"


def locked() -> Iterator[Package]:
    """The packages of the lock."""
    for line in LOCK.read_text().splitlines():
        if found := _LINE.fullmatch(line):
            extras = tuple(found["needed_by"].split(", "))
            yield Package(**(found.groupdict() | {"needed_by": extras}))


@cache
def projects() -> dict[str, dict[str, list[str]]]:
    """What this project's own packages need now, as in metadata, by their names."""
    found = {}
    for name, directory in PROJECTS.items():
        project = tomllib.loads((directory / "pyproject.toml").read_text())["project"]
        lines = project["dependencies"]
        for extra, more in project["optional-dependencies"].items():
            for line in more:
                requirement, _, marker = line.partition(";")
                both = f"extra == '{extra}'" + (f" and ({marker})" if marker else "")
                lines.append(f"{requirement}; {both}")
        extras = list(project["optional-dependencies"])
        found[name] = {"requires_dist": lines, "provides_extra": extras}
    return found


def extras() -> dict[str, str]:
    """The requirement that stands for each extra, by the name that the lock has for it."""
    found = {"always": "nmoe-data"}
    for extra in projects()["nmoe-data"]["provides_extra"]:
        found[extra] = f"nmoe-data[{extra}]"
    for extra in projects()["nmoe-loader"]["provides_extra"]:
        found[f"loader[{extra}]"] = f"nmoe-loader[{extra}]"
    return found


def needed(requirement: str, metadata: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Names of the packages that a requirement leads to, beside this project's own.

    Args:
        metadata: By the name of a package; an absent one leads to no other.
    """
    known = {**metadata, **projects()}
    seen = set()
    todo = [Requirement(requirement)]
    while todo:
        asked = todo.pop()
        name = canonicalize_name(asked.name)
        for extra in {"", *asked.extras} - {extra for other, extra in seen if other == name}:
            seen.add((name, extra))
            for line in known.get(name, {}).get("requires_dist", []):
                more = Requirement(line)
                if more.marker is None or more.marker.evaluate({"extra": extra}):
                    todo.append(more)
    return {name for name, _ in seen} - set(PROJECTS)


def licence(metadata: Mapping[str, Any]) -> str:
    """What a package states: an expression, or else its classifiers, or else its words."""
    words = metadata.get("license_expression") or metadata.get("license", "").strip()
    with suppress(InvalidLicenseExpression):
        return canonicalize_license_expression(words)
    classifiers = (line.split(" :: ") for line in metadata.get("classifier", []))
    named = [parts[-1] for parts in classifiers if parts[0] == "License"]
    return ", ".join(named) or words.partition("\n")[0] or "not stated"


def is_compatible(licence: str, compatible: Collection[str]) -> bool:
    """Whether a licence leaves a choice of which every part is compatible."""

    def holds(part: Any) -> bool:
        if isinstance(part, _SPDX.AND | _SPDX.OR):
            parts = map(holds, part.args)
            return all(parts) if isinstance(part, _SPDX.AND) else any(parts)
        return str(part) in compatible

    try:
        return holds(_SPDX.parse(canonicalize_license_expression(licence)))
    except InvalidLicenseExpression:
        return all(name in compatible for name in licence.split(", "))


def packages(report: Iterable[Mapping[str, Any]]) -> Iterator[Package]:
    """What pip would install, without this project."""
    items = {canonicalize_name(item["metadata"]["name"]): item for item in report}
    metadata = {name: item["metadata"] for name, item in items.items()}
    wanted = {extra: needed(by, metadata) for extra, by in extras().items()}
    for name in sorted(items.keys() - PROJECTS):
        users = [extra for extra, names in wanted.items() if name in names]
        product = [extra for extra in users if extra not in (*FOR_TESTS, "all")]
        hashes = items[name]["download_info"].get("archive_info", {}).get("hashes", {})
        yield Package(
            name,
            metadata[name]["version"].partition("+")[0],
            None if name in WITHOUT_HASH else hashes["sha256"],
            licence(metadata[name]),
            ("always",) if "always" in product else tuple(product) or ("tests",),
        )


def main() -> None:
    """Ask pip what it would install, and write it."""
    wanted = []
    for name, directory in PROJECTS.items():
        asked_for = ",".join(projects()[name]["provides_extra"])
        wanted += ["-e", f"{directory}[{asked_for}]"]
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    asked = subprocess.run(
        [*pip, "--report", "-", "-c", CONSTRAINTS, *wanted], check=True, capture_output=True
    )
    report = json.loads(asked.stdout)
    if int(report["pip_version"].partition(".")[0]) < 25:  # earlier ones report no SPDX expressions
        sys.exit(f"pip is {report['pip_version']}; first run: python -m pip install -U pip")
    found = list(packages(report["install"]))
    LOCK.write_text(_HEADER + "".join(f"{package.line}\n" for package in found))
    kept = ("#", *(f"{name}==" for name in WITHOUT_HASH))
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if line.startswith(kept)]
    lines += [f"{one.name}=={one.version}" for one in found if one.sha256]
    CONSTRAINTS.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
