"""The page dependencies.md of the site: every dependency with its licence, from the lock.

`make docs` puts it into the site; `python docs/make_dependencies.py` prints it.
"""

import runpy
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEAD = """# Dependencies

The packages of `requirements.lock`, with the licence that each states and the extras that need it:
`always` is needed without any extra, `tests` by tests and development alone, `loader[...]` by an
extra of nmoe-loader. This project is Apache-2.0, and its wheels contain none of these packages. A
test refuses a licence that is neither compatible, as `docs/licences.toml` has it, nor among these
exceptions:

"""
BINARIES = """
Wheels contain compiled libraries that the stated licence may not name: numpy and scipy contain
libgfortran (GPL with the GCC Runtime Library Exception). torch from a public registry is built for
CUDA on Linux, and installs packages of NVIDIA under NVIDIA's own terms; they and packages for other
systems and Pythons are not in the lock.

| package | version | licence | needed by |
|---|---|---|---|
"""


def exceptions() -> dict[str, str]:
    """Why a package is admitted, by its name."""
    return tomllib.loads((HERE / "licences.toml").read_text())["exceptions"]


def page() -> str:
    """The page's Markdown."""
    lines = [f"* `{name}`: {reason}\n" for name, reason in exceptions().items()]
    lines.append(BINARIES)
    for one in runpy.run_path(str(HERE.parent / ".ci" / "make_lock.py"))["locked"]():
        needed_by = ", ".join(one.needed_by)
        lines.append(f"| {one.name} | {one.version} | {one.licence} | {needed_by} |\n")
    return HEAD + "".join(lines)


if __name__ == "__main__":
    print(page(), end="")
