"""Configurations that are part of a package, by name."""

import importlib.resources
from pathlib import Path

from loader.errors import ConfigError

MIXTURES = "configs/mixtures"
FLOWS = "configs"


def packaged(package: str, folder: str) -> dict[str, Path]:
    """The configurations in a folder of a package, by name. In a checkout of the repository the
    folder is a link into the top-level `configs/`."""
    directory = Path(str(importlib.resources.files(package))) / folder
    return {path.stem: path.resolve() for path in sorted(directory.glob("*.toml"))}


def find_config(named: str, folder: str, base: Path, package: str, where: object) -> Path:
    """The file of a configuration that `where` names: a path relative to `base`, which may be
    missing, or the name of a file in a folder of the package. `{folder}/{name}.toml`, the path of a
    project's copy, is the package's file if the project has no copy. Raises ConfigError if the name
    is unknown (E-CONFIG-MISSING)."""
    path = base / named
    known = packaged(package, folder)
    spelled = {f"{folder}/{name}.toml": own for name, own in known.items()}
    if path.is_file():
        return path
    if named in known | spelled:
        return (known | spelled)[named]
    if "/" in named or "." in named:
        return path
    raise ConfigError(
        "no file and no configuration with this name",
        where=where,
        found=repr(named),
        expected=f"a path, or one of {', '.join(known)}",
        code="E-CONFIG-MISSING",
    )
