"""The process that runs a function of the user's own, with limits of memory and time.

Messages are JSON over a pipe; the process's argument is the pipe's file descriptor. The first
message names the function, its code and its limits; the answer is empty, or says why the function
cannot be imported. Each later message is a batch of documents. The answer is what the function
returned for them, or how it failed.
"""

import importlib
import json
import os
import resource
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from nmoe_core.base.compute.own.code import Code, find_code
from nmoe_core.base.errors import one_line


class Batch(NamedTuple):
    """What a function gets. What it returns for a document must depend on this document alone."""

    texts: Sequence[str]
    sources: Sequence[str]
    """The source of each document."""
    columns: Mapping[str, Sequence[Any]]
    """The values of the passthrough columns in `reads`, by name."""
    settings: Mapping[str, Any]
    model: Path | None


def main() -> None:
    """Answer the messages from the pipe until it is closed."""
    pipe = Connection(int(sys.argv[1]))
    os.set_inheritable(pipe.fileno(), False)  # a program that the function starts gets no pipe
    asked = json.loads(pipe.recv_bytes())
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file can be written
    tempfile.tempdir = os.environ.get("TMPDIR", "/tmp")  # known, so it is not tried by a file
    resource.setrlimit(resource.RLIMIT_AS, (asked["memory_bytes"], asked["memory_bytes"]))
    code = Code(*asked["code"])
    constant = asked["settings"], asked["model"] and Path(asked["model"])
    process = os.getpid()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    function: Callable[[Batch], Any] | None = None
    payload = b""
    while True:
        try:
            if function is None:
                function = _imported(asked["name"], code)
                answer: dict[str, Any] = {}
            else:
                texts, sources, columns = json.loads(payload)
                batch = Batch(texts, sources, columns, *constant)
                answer = {"returned": function(batch)}
            answer |= {"outside": _outside(code)}
            message = json.dumps(answer, default=_plain)
        except BaseException as error:  # noqa: BLE001 (of the function's code)
            message = json.dumps(_failure(error, code))
        if os.getpid() != process:  # the function forked, and only its process may answer
            os._exit(0)
        try:
            pipe.send_bytes(message.encode())
            payload = pipe.recv_bytes()
        except (EOFError, OSError):
            return


def _end_with(parent: int) -> None:
    """End this process soon after its parent, also during a call."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _imported(name: str, code: Code) -> Callable[[Batch], Any]:
    module, _, function = name.partition(":")
    if code.directory is not None:
        sys.path.insert(0, code.directory)
    found = getattr(importlib.import_module(module), function)
    if find_code(name, code.directory).sha256 != code.sha256:
        raise ImportError("its code changed while the run was going on; run again")
    return found


def _outside(code: Code) -> str | None:
    """A file of the code's directory that was imported and is not part of the code."""
    if code.directory is None:
        return None
    root = str(Path(code.directory).resolve())
    inner = tuple(path + os.sep for path in sys.path if path.startswith(root + os.sep))
    for module in [*sys.modules.values()]:
        path = os.path.realpath(getattr(module, "__file__", None) or os.sep)
        if path.startswith(root + os.sep) and not path.startswith(inner) and path not in code.files:
            return path
    return None


def _failure(error: BaseException, code: Code) -> dict[str, Any]:
    if isinstance(error, MemoryError):
        return {"failed": None}
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if os.path.realpath(frame.filename) in code.files]
    place = f" ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})" if own else ""
    return {"failed": type(error).__name__, "message": one_line(error) + place}


def _plain(value: Any) -> Any:
    """A value of numpy, torch or pyarrow as one of Python."""
    for name in ("tolist", "to_pylist", "as_py"):
        if hasattr(value, name):
            return getattr(value, name)()
    raise TypeError(f"a value of type {type(value).__name__} cannot be returned")


if __name__ == "__main__":
    main()
