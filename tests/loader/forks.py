"""Runs examples in forks of one process, which imports what they need once: seconds for each.

Reads a JSON line for each run, {script, argv, ranks, kill_at, port}, and answers with one, {lines,
status}: what rank 0 printed, and how each ended. A rank kills itself, as SIGKILL does, once it has
printed a line that begins with `kill_at`: from outside it could come some steps later.
"""

import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from typing import TextIO


class Deadly:
    """A standard output that kills its process after a line."""

    def __init__(self, file: TextIO, last: str) -> None:
        self._file, self._last = file, last

    def write(self, text: str) -> None:
        """Write, and end where this is the line."""
        if text.startswith(self._last):
            self._file.write(f"{text}\n")
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        self._file.write(text)

    def flush(self) -> None:
        """As a file's."""
        self._file.flush()


def run(script: str, argv: list[str], ranks: int, kill_at: str | None, port: int) -> dict:
    """One run of a script."""
    reader, writer = os.pipe()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.dup2(writer, 1) if rank == 0 else os.dup2(2, 1)
            os.close(reader)
            if ranks > 1:
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
                place |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
                os.environ |= {key: str(value) for key, value in place.items()}
                os.environ["MASTER_ADDR"] = "127.0.0.1"
            if kill_at is not None:
                sys.stdout = Deadly(sys.stdout, kill_at)
            sys.argv, sys.path[0] = [script, *argv], os.path.dirname(script)
            status = 1
            try:
                runpy.run_path(script, run_name="__main__")
                status = 0
            finally:
                if status:
                    traceback.print_exc(file=sys.stdout)
                    sys.stdout.flush()
                os._exit(status)
        children.append(child)
    os.close(writer)
    lines = []
    with open(reader, encoding="utf-8") as output:
        for line in output:
            lines.append(line.rstrip("\n"))
            if kill_at is not None and line.startswith(kill_at):
                break  # its workers hold the pipe for some seconds
    return {"lines": lines, "status": [os.waitpid(child, 0)[1] for child in children]}


if __name__ == "__main__":
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for request in sys.stdin:
        print(json.dumps(run(**json.loads(request))), flush=True)
