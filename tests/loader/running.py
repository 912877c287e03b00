"""Runs examples, and scripts like them, in one or more ranks."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.project import REPOSITORY

TRAINERS = REPOSITORY / "examples" / "trainers"
IMPORTED = ["torch._dynamo", "torch.nn.parallel", "torch.distributed.checkpoint.state_dict"]


class Examples:
    """Examples, run over one plan by `forks.py`."""

    def __init__(self, process: subprocess.Popen[str], plan: Path, steps: int) -> None:
        self._process, self._plan, self._steps = process, plan, steps

    def run(
        self,
        name: str,
        place: Path,
        *argv: object,
        ranks: int = 1,
        kill_at: str | None = None,
        plan: Path | None = None,
    ) -> dict[int, float]:
        """The loss of each step, with every digit, of an example or of a script by its path."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        request: dict[str, Any] = {"script": str(TRAINERS / f"{name}.py"), "ranks": ranks}
        given = [plan or self._plan, "--checkpoint", place, "--steps", self._steps, *argv]
        request |= {"argv": list(map(str, given)), "kill_at": kill_at, "port": port}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert answer["status"] == [9 if kill_at else 0] * ranks, answer
        found = (
            re.fullmatch(rf"step (\d+), ranks {ranks}, loss (.*)", line) for line in answer["lines"]
        )
        return {int(match[1]): float(match[2]) for match in found if match}


@contextmanager
def running(plan: Path, steps: int, *modules: str) -> Iterator[Examples]:
    """Examples over a plan, each for these steps unless told otherwise; of the modules, those that
    are installed are imported once."""
    found = [name for name in modules if find_spec(name)]
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name("forks.py")]
    command += [*IMPORTED, *found]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    with subprocess.Popen(
        command, stdin=-1, stdout=-1, stderr=-3, text=True, env=environment
    ) as process:
        yield Examples(process, plan, steps)
        assert process.stdin is not None
        process.stdin.close()  # the process ends, unless one of its ranks does not
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
