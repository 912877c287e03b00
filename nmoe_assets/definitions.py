"""The code location: `nmoe_assets.definitions.defs`, for the run that `NMOE_CONFIG` names."""

import functools
import os
from pathlib import Path

from nmoe_assets.component import build_definitions
from nmoe_core.config.run import Run

CONFIG_VARIABLE = "NMOE_CONFIG"
_CHECKOUT = Path(__file__).resolve().parent.parent / "configs" / "demo.toml"
# Of the checkout where this is one, else of the project in the working directory (`nmoe init`).
DEFAULT_CONFIG = _CHECKOUT if _CHECKOUT.is_file() else Path("configs", "demo.toml")


@functools.cache
def current_run() -> Run:
    """The run that `NMOE_CONFIG` names, read once in a process."""
    return Run(os.environ.get(CONFIG_VARIABLE) or DEFAULT_CONFIG)


defs = build_definitions(current_run())
