"""The directory that all projects of a user share: vocabularies, models, local copies of runs."""

import os
from pathlib import Path

from loader.files.addresses import local_path


def cache_dir() -> Path:
    """This project's cache: `NMOE_CACHE_DIR`, else `nmoe` under the user's cache directory."""
    if named := os.environ.get("NMOE_CACHE_DIR"):
        return local_path(named, "NMOE_CACHE_DIR")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nmoe"
