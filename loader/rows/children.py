"""Import paths of the Python processes that this one starts."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()  # the environment is of the whole process


@contextmanager
def safe_children() -> Iterator[None]:
    """Keep the working directory off the import path of processes that start meanwhile.

    `python -m` and `python -c`, by which multiprocessing starts clean processes, look there first:
    a `json.py` among downloaded files would be executed.
    """
    with _lock:
        before = os.environ.get("PYTHONSAFEPATH", "")  # empty is as unset
        os.environ["PYTHONSAFEPATH"] = "1"
        try:
            yield
        finally:
            os.environ["PYTHONSAFEPATH"] = before
