"""The run that the definitions describe: the TOML named by `NMOE_CONFIG`."""

import functools
import os
from pathlib import Path

from nmoe_core.config.run import Run

CONFIG_VARIABLE = "NMOE_CONFIG"
_CHECKOUT = Path(__file__).resolve().parent.parent / "configs" / "demo.toml"
# Of the checkout where this is one, else of the project in the working directory (`nmoe init`).
DEFAULT_CONFIG = _CHECKOUT if _CHECKOUT.is_file() else Path("configs", "demo.toml")


@functools.cache
def current_run() -> Run:
    """The run, read once in a process."""
    return Run(os.environ.get(CONFIG_VARIABLE) or DEFAULT_CONFIG)
