"""A process for untrusted input, which its parent ends after a time limit."""

import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from multiprocessing.connection import Pipe
from typing import Any


class _Session(subprocess.Popen[bytes]):
    """A process that leads a session, so that the processes that it starts end with it."""

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class LimitedProcess:
    """A process that runs a module, which answers messages from a pipe. The file descriptor of the
    pipe is the module's argument; the module limits its own memory. `environment` are all variables
    of the process; None: those of this process.

    Attributes:
        process: The process.
        close: Ends the process and all that it started; garbage collection of this object does too.
    """

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        self._pipe, its_end = Pipe()
        # -P: never import modules from the working directory, which may be hostile.
        command = [sys.executable, "-P", "-m", module, str(its_end.fileno())]
        nowhere = subprocess.DEVNULL
        self.process = _Session(
            command,
            pass_fds=[its_end.fileno()],
            stdin=nowhere,
            stdout=nowhere,
            stderr=nowhere,
            env=environment,
            start_new_session=True,
        )
        its_end.close()
        self.close = weakref.finalize(self, _end, self.process, self._pipe, os.getpid())

    def tell(self, message: Any) -> None:
        """Send a message that has no answer."""
        with suppress(OSError):  # the process has ended, but may have answered before
            self._pipe.send_bytes(message)

    def ask(self, messages: Iterable[Any], limit_s: float) -> bytes:
        """The answer to the last of these messages. Empty if the process has ended, or has not
        answered in `limit_s` seconds; it is then closed."""
        answer = b""
        for message in messages:
            self.tell(message)
        with suppress(OSError, EOFError):
            answer = self._pipe.recv_bytes() if self._pipe.poll(limit_s) else b""
        if not answer:
            self.close()
        return answer


def _end(process: subprocess.Popen[bytes], pipe: Any, owner: int) -> None:
    pipe.close()
    if os.getpid() != owner:  # a fork of the owner, which has a copy of this object
        return
    process.kill()
    process.wait()
