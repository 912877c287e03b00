"""Arrays in `.npy` files that may be damaged, or another's."""

from pathlib import Path
from tokenize import TokenError

import numpy as np


def map_npy(path: Path) -> np.ndarray:
    """The array of a `.npy` file, mapped: a header that promises more than the file holds takes no
    memory. Raises FileNotFoundError; ValueError: the file is no such array."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except (EOFError, OverflowError, TokenError) as error:  # of headers alone
        raise ValueError(f"not a .npy file: {error}") from None
