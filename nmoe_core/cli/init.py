"""`nmoe init DIR`: a new project, with the configurations that come with the package."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from nmoe_core.base.errors import ConfigError
from nmoe_core.config.shipped import CONFIGS

WORKSPACE = "load_from:\n  - python_module: nmoe_assets.definitions\n"


def register(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("init", help="a new project with the configurations shipped here")
    parser.add_argument("directory", type=Path, metavar="DIR", help="made if it is not there")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Copy the configurations; nothing that is there is written over."""
    configs = arguments.directory / "configs"
    workspace = arguments.directory / "workspace.yaml"
    for path in (configs, workspace):
        if path.exists():
            raise ConfigError("this is there already", where=path, do="name another directory")
    shutil.copytree(CONFIGS, configs)
    workspace.write_text(WORKSPACE)
    print(f"{configs}: runs (*.toml), mixtures, flow profiles, rubrics, dagster/dagster.yaml")
    return 0
