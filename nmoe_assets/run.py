"""The run that the definitions describe: the TOML named by `NMOE_CONFIG`."""

import functools
import os
from pathlib import Path

from nmoe_core.config import Run

CONFIG_VARIABLE = "NMOE_CONFIG"
DEFAULT_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "demo.toml"


@functools.cache
def current_run() -> Run:
    """The run, read once in a process."""
    return Run(os.environ.get(CONFIG_VARIABLE) or DEFAULT_CONFIG)
