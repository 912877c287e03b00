"""Files of a stranger in a working directory that are named as the modules of Python and others."""

import importlib.metadata
import sys
from pathlib import Path

# It says that it ran, by nothing that it would have to import.
_MODULE = 'open(__file__ + ".ran", "w").close()\n'


class Planted:
    """Modules in a directory that shadow all that can be imported."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        names = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions()}
        for name in filter(str.isidentifier, names):
            (directory / f"{name}.py").write_text(_MODULE)

    def ran(self) -> list[str]:
        """Those that were executed."""
        return sorted(path.stem for path in self.directory.glob("*.ran"))
