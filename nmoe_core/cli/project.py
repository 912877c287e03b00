"""`nmoe init DIR`, `nmoe make-tiny-checkpoint DIR`: what a new project starts with."""

import argparse
import importlib.resources
import shutil
from pathlib import Path
from typing import Any

from nmoe_core.base.errors import ConfigError
from nmoe_core.cli.output import add_verb

WORKSPACE = "load_from:\n  - python_module: nmoe_assets.definitions\n"


def register(verbs: Any) -> None:
    init = add_verb(
        verbs, "init", make_project, "a new project with the configurations shipped here"
    )
    init.add_argument("directory", type=Path, metavar="DIR", help="made if it is not there")
    text = "write a tiny checkpoint of random weights"
    tiny = add_verb(verbs, "make-tiny-checkpoint", make_tiny, text)
    tiny.add_argument("directory", type=Path)
    text = "kind of decoder: gpt_oss (default), llama, qwen3 or qwen3_moe"
    tiny.add_argument("--family", default="gpt_oss", metavar="NAME", help=text)
    tiny.add_argument("--seed", type=int, default=0)


def make_project(arguments: argparse.Namespace) -> int:
    """Copy the configurations; a file that is there already is never replaced."""
    configs = arguments.directory / "configs"
    workspace = arguments.directory / "workspace.yaml"
    for path in (configs, workspace):
        if path.exists():
            raise ConfigError("this is there already", where=path, do="name another directory")
    for package in ("loader", "nmoe_core"):
        with importlib.resources.as_file(importlib.resources.files(package) / "configs") as shipped:
            shutil.copytree(shipped, configs, dirs_exist_ok=True)
    workspace.write_text(WORKSPACE)
    print(f"{configs}: runs (*.toml), mixtures, flow profiles, rubrics, dagster/dagster.yaml")
    return 0


def make_tiny(arguments: argparse.Namespace) -> int:
    """Write the checkpoint unless it is there already."""
    from nmoe_core.engine.weights.tiny import make_tiny_checkpoint

    family = arguments.family
    path = make_tiny_checkpoint(arguments.directory, family=family, seed=arguments.seed)
    print(f"{path}: 8-layer {family} checkpoint of seeded random weights")
    return 0
