"""Writes a bill of materials, in CycloneDX's JSON, beside the wheels that it describes.

    .venv/bin/python .ci/make_sbom.py build/wheels

It has both wheels with their SHA-256, and each package of the lock that an extra needs, with
version, licence and SHA-256: the set that is tested, where the wheels themselves admit ranges.
torch has no SHA-256, and no package says which other package needs it: `nmoe:needed_by` has the
extras. The same wheels and lock give the same bytes if SOURCE_DATE_EPOCH is set.
"""

import os
import sys
import time
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from make_lock import Package, locked
from packageurl import PackageURL
from packaging.utils import parse_wheel_filename


def component(package: Package) -> Component:
    """A package as CycloneDX has it."""
    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=package.sha256)] if package.sha256 else []
    purl = PackageURL("pypi", None, package.name, package.version)
    is_required = package.needed_by == ("always",)
    return Component(
        type=ComponentType.LIBRARY,
        name=package.name,
        version=package.version,
        bom_ref=str(purl),
        purl=purl,
        licenses=[LicenseFactory().make_from_string(package.licence)],
        hashes=hashes,
        scope=ComponentScope.REQUIRED if is_required else ComponentScope.OPTIONAL,
        properties=[Property(name="nmoe:needed_by", value=", ".join(package.needed_by))],
    )


def write(directory: Path) -> None:
    """Write `nmoe-data.cdx.json` into the directory of the wheels."""
    found = [package for package in locked() if package.needed_by != ("tests",)]
    for wheel in sorted(directory.glob("*.whl")):
        name, version, *_ = parse_wheel_filename(wheel.name)
        digest = sha256(wheel.read_bytes()).hexdigest()
        found.append(Package(name, str(version), digest, "Apache-2.0", ("always",)))
    components = {package.name: component(package) for package in found}
    bom = Bom()
    bom.serial_number = uuid5(NAMESPACE_URL, "".join(package.line for package in found))
    bom.metadata.timestamp = datetime.fromtimestamp(
        float(os.environ.get("SOURCE_DATE_EPOCH", time.time())), UTC
    )
    bom.metadata.component = components.pop("nmoe-data")
    bom.components.update(components.values())
    bom.register_dependency(bom.metadata.component, components.values())
    JsonV1Dot6(bom).output_to_file(str(directory / "nmoe-data.cdx.json"), True, indent=2)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
