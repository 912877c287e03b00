"""Work of writers in processes that signals may end.

A process that has imported what they need forks one for each: a start costs hundredths of a second,
and no thread of the tests is copied, which a library's own threads would not survive.
"""

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.crash.all_writers import ALL_WRITERS
from tests.project import REPOSITORY

# What commands import when they run.
HEAVY = (
    *("duckdb", "matplotlib.pyplot", "obstore", "pyarrow.parquet", "pydivsufsort", "safetensors"),
    *("scipy.stats", "sklearn.cluster", "sklearn.decomposition", "sklearn.metrics", "torch"),
    *(
        "nmoe_core.engine.generation.generator",
        "nmoe_core.quality.heads.train",
        "nmoe_core.tasks.report.write",
    ),
    *(
        "nmoe_core.quality.heads.scoring",
        "nmoe_core.tasks.ablate.result",
        "nmoe_core.curate.jsonl.run",
    ),
    *("nmoe_core.tasks.curate", "nmoe_core.tasks.takedown.report", "nmoe_core.tasks.attributes"),
    *("nmoe_assets.verbs", "nmoe_core.quality.grading.grade", "numba"),
)


class Forked:
    """Runs writers of a project, one after the other.

    Args:
        directory: For what they print.
        imports: Modules that are imported first.

    Attributes:
        took_s: Seconds of the last one.
    """

    def __init__(self, directory: Path, imports: tuple[str, ...] = ()) -> None:
        self._printed, self.took_s = directory / "printed", 0.0
        command = [sys.executable, "-m", "tests.crash.forked", str(self._printed), *imports]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._server = subprocess.Popen(command, cwd=REPOSITORY, **pipes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, where: TracebackType | None
    ) -> None:
        self._server.communicate()

    @property
    def printed(self) -> str:
        """The end of what the last one printed."""
        return self._printed.read_text(errors="replace")[-2000:]

    def __call__(
        self,
        name: str,
        work: Path,
        sent: signal.Signals | None = None,
        after_s: float = 0,
        part: str = "run",
    ) -> int:
        """The exit status of a writer's work, or minus the signal that ended it; it gets the signal
        `sent` after a while."""
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.write(json.dumps([name, str(work), part]) + "\n")
        self._server.stdin.flush()
        child, started = int(self._server.stdout.readline()), time.monotonic()
        if sent is not None:
            with suppress(ProcessLookupError):
                _send(child, sent, after_s)
        status = int(self._server.stdout.readline())
        self.took_s = time.monotonic() - started
        return status


def _send(child: int, sent: signal.Signals, after_s: float) -> None:
    """Send a signal after a while, unless the process has ended."""
    handle = os.pidfd_open(child)  # a number may be another process's later
    try:
        if not select.select([handle], [], [], after_s)[0]:
            signal.pidfd_send_signal(handle, sent)
    finally:
        os.close(handle)


def _work(printed: str, name: str, work: str, part: str) -> int:
    """The exit status."""
    target = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = getattr(ALL_WRITERS[name], part)(Path(work))
        return int(done or 0) if part == "run" else 0
    except SystemExit as error:
        return int(error.code or 0)
    except KeyboardInterrupt:  # before the command's own handler, or after it
        return 130
    except BaseException:  # noqa: BLE001  (shown, and none of the statuses that are expected)
        traceback.print_exc()
        return 70


def _serve(printed: str, *imports: str) -> None:
    for module in imports:
        importlib.import_module(module)
    from nmoe_core.text.tokenizer import load_tokenizer

    load_tokenizer()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            status = 70
            try:
                status = _work(printed, *json.loads(line))
                sys.stdout.flush()
            except KeyboardInterrupt:
                status = 130
            finally:
                os._exit(status)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
