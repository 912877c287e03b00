"""Import paths of the Python processes that this process starts."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()  # a lock, since all threads share the environment


@contextmanager
def safe_children() -> Iterator[None]:
    """Keep the working directory off the import path of processes that are started in the block.

    multiprocessing starts processes with `python -c`, which imports from the working directory
    first: a file `json.py` among downloaded data would be executed.
    """
    with _lock:
        # Python treats an empty PYTHONSAFEPATH like an unset one.
        before = os.environ.get("PYTHONSAFEPATH", "")
        os.environ["PYTHONSAFEPATH"] = "1"
        try:
            yield
        finally:
            os.environ["PYTHONSAFEPATH"] = before
