"""Arrays in `.npy` files that may be damaged or come from others."""

from pathlib import Path
from tokenize import TokenError

import numpy as np

from loader.files.regular import regular

# numpy parses a header and its dtype as Python, so a bad header raises these besides ValueError.
_OF_HEADERS = (EOFError, OverflowError, TokenError, SyntaxError, TypeError)
_OF_HEADERS += (MemoryError, RecursionError)  # from deep nesting, since a map takes no memory


def map_npy(path: Path) -> np.ndarray:
    """Map the array of a `.npy` file, so a header with a false size allocates no memory. Raises
    FileNotFoundError, or ValueError if the file is not a `.npy` array."""
    try:
        return np.lib.format.open_memmap(regular(path), mode="r")
    except _OF_HEADERS as error:
        raise ValueError(f"not a .npy file: {error}") from None
