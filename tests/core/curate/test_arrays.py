"""Arrays of files that may be damaged."""

import struct
from pathlib import Path

import numpy as np
import pytest

from nmoe_core.curate.arrays import map_npy

_GOOD = "{'descr': '<u8', 'fortran_order': False, 'shape': (2,)}"


def write(path: Path, header: str) -> Path:
    """A `.npy` file of 16 bytes with this header."""
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode())
    with open(path, "ab") as file:
        file.write(bytes(16))
    return path


def test_an_array_is_mapped(tmp_path: Path) -> None:
    found = map_npy(write(tmp_path / "a.npy", _GOOD))
    assert isinstance(found, np.memmap)
    assert (found.dtype, found.tolist()) == (np.uint64, [0, 0])


@pytest.mark.parametrize(
    "header",
    [
        *(_GOOD.replace("<u8", kind) for kind in (",u8", "(,)u8", "O", "", "<u8\\x00")),
        *(_GOOD.replace("2", size) for size in ("True", "9" * 30, "-1", "3", "2" * 5000)),
        *("-" * 9000 + "1", "[" * 9000, "{[]: 1}", "{1: 2, 'a': 3}", "\\", ""),
    ],
)
def test_a_header_that_no_array_has_is_a_value_error(tmp_path: Path, header: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        map_npy(write(tmp_path / "a.npy", header))
