"""Arrays in `.npy` files that may be damaged or come from other people."""

from pathlib import Path
from tokenize import TokenError

import numpy as np

from loader.files.regular import regular

# numpy parses a header and its dtype as Python, so a bad header raises these errors besides
# ValueError.
_OF_HEADERS = (EOFError, OverflowError, TokenError, SyntaxError, TypeError)
# MemoryError comes from deep nesting, since mapping a file takes no memory
_OF_HEADERS += (MemoryError, RecursionError)


def map_npy(path: Path) -> np.ndarray:
    """Map the array of a `.npy` file, so a header with a false size allocates no memory. Raises
    FileNotFoundError, or ValueError if the file is not a `.npy` array."""
    try:
        return np.lib.format.open_memmap(regular(path), mode="r")
    except _OF_HEADERS as error:
        raise ValueError(f"not a .npy file: {error}") from None
