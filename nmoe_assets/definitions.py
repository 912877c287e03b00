"""The code location: `nmoe_assets.definitions.defs`, for the run that `NMOE_CONFIG` names."""

import functools
import gc
import os

from nmoe_assets.component import build_definitions
from nmoe_core.config.run import Run

CONFIG_VARIABLE = "NMOE_CONFIG"
# a path relative to the working directory, else a name in the package
DEFAULT_CONFIG = "configs/demo.toml"


@functools.cache
def current_run() -> Run:
    """The run that `NMOE_CONFIG` names, read once in a process."""
    return Run(os.environ.get(CONFIG_VARIABLE) or DEFAULT_CONFIG)


defs = build_definitions(current_run())
# The definitions live as long as the process, so the garbage collector can skip them.
gc.freeze()
