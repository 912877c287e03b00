"""Writes constraints.txt, and requirements.lock, which has the SHA-256 of each wheel of that set.

    .venv/bin/python .ci/make_lock.py

pip chooses the set for the machine and the Python that this runs on, under the constraints that are
there: a package is upgraded where its line was removed before. The lock is for Linux on x86-64 with
Python 3.11. torch, whose build belongs to a machine's devices, and its triton are not in it.
"""

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
LOCK, CONSTRAINTS = REPOSITORY / "requirements.lock", REPOSITORY / "constraints.txt"
OF_THE_DEVICE = ("torch", "triton")
_HEADER = """\
# The wheels of constraints.txt for Linux on x86-64 with Python 3.11, made by .ci/make_lock.py.
# torch, built for a machine's devices, and its triton are left out. To install them all:
#     pip install --no-deps --require-hashes -r requirements.lock
#     pip install -c constraints.txt torch triton
#     pip install --no-deps ./loader .
"""
_KEPT = ("#", *(f"{name}==" for name in OF_THE_DEVICE))


def main() -> None:
    """Ask pip what it would install, and write it."""
    wanted = ["-c", "constraints.txt", "-e", "./loader", "-e", ".[all,dev,test-all]"]
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    asked = subprocess.run(
        [*pip, "--report", "-", *wanted], cwd=REPOSITORY, check=True, capture_output=True
    )
    lines = []
    for item in json.loads(asked.stdout)["install"]:
        name, version = item["metadata"]["name"].lower(), item["metadata"]["version"]
        hashes = item["download_info"].get("archive_info", {}).get("hashes", {})
        if hashes and name not in OF_THE_DEVICE:  # none for this project's own packages
            lines.append(f"{name}=={version} --hash=sha256:{hashes['sha256']}\n")
    lines.sort()
    LOCK.write_text(_HEADER + "".join(lines))
    kept = [line for line in CONSTRAINTS.read_text().splitlines() if line.startswith(_KEPT)]
    pins = [line.partition(" ")[0] for line in lines]
    CONSTRAINTS.write_text("\n".join([*kept, *pins, ""]))


if __name__ == "__main__":
    main()
