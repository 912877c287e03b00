"""How long a program was outside `nmoe_core`.

python -m benchmarks.platform.outside FILE MODULE ARG... runs the module. Two minutes of training
differ by more from run to run, on a shared machine, than a platform costs. So the main thread is
looked at every 10 ms, and the time in which no function of `nmoe_core` was running is added up:
start-up, imports and all that Dagster does. FILE takes the seconds.
"""

from __future__ import annotations

import runpy
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import psutil

_EVERY_S = 0.01
_CORE = "/nmoe_core/"


class _Watch(threading.Thread):
    """Adds up the time that a thread is inside."""

    def __init__(self, thread_id: int) -> None:
        super().__init__(daemon=True)
        self.inside_s = 0.0
        self._thread_id = thread_id

    def run(self) -> None:
        before = time.perf_counter()
        while True:
            time.sleep(_EVERY_S)
            is_inside = _is_inside(sys._current_frames().get(self._thread_id))
            now = time.perf_counter()
            self.inside_s += (now - before) * is_inside
            before = now


def _is_inside(frame: FrameType | None) -> bool:
    while frame is not None:
        if _CORE in frame.f_code.co_filename and frame.f_code.co_name != "<module>":
            return True
        frame = frame.f_back
    return False


def main() -> None:
    """Run the module of the command line."""
    _, file, module, *arguments = sys.argv
    watch = _Watch(threading.get_ident())
    watch.start()
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        whole_s = time.time() - psutil.Process().create_time()
        Path(file).write_text(f"{whole_s - watch.inside_s:.3f}")


if __name__ == "__main__":
    main()
