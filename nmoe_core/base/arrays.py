"""Arrays in `.npy` files that may be damaged or come from others."""

from pathlib import Path
from tokenize import TokenError

import numpy as np

# Raised by numpy for headers, beside ValueError: it reads them, and types in them, as Python.
_OF_HEADERS = (EOFError, OverflowError, TokenError, SyntaxError, TypeError)
_OF_HEADERS += (MemoryError, RecursionError)  # of deep nesting; a map takes no memory


def map_npy(path: Path) -> np.ndarray:
    """The array of a `.npy` file, mapped: a header that promises more than the file holds takes no
    memory. Raises FileNotFoundError; ValueError: the file is no such array."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except _OF_HEADERS as error:
        raise ValueError(f"not a .npy file: {error}") from None
