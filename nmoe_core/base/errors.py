"""Errors of the tasks that make data, each with the stem of its codes; see `loader.errors`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from loader.errors import ConfigError as ConfigError
from loader.errors import FormatError as FormatError
from loader.errors import NmoeError as NmoeError
from loader.errors import StateError as StateError
from loader.errors import one_line as one_line
from loader.errors import printable as printable

# From torch, its libraries and Triton; a worker's error may come as a text alone.
_FULL = re.compile(r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
_LOST = re.compile(r"\b(CUDA|HIP|cuDNN|NCCL) error\b|Triton Error", re.IGNORECASE)


class SourceError(NmoeError):
    """A source is missing, empty, changed while it was read, or holds a record that cannot be
    read."""

    code = "E-SOURCE"


class TokenizerError(NmoeError):
    """The vocabulary is missing, or a tokenizer engine or a manifest disagrees with it."""

    code = "E-TOKENIZER"


class CheckpointError(NmoeError):
    """A backbone checkpoint is missing, incomplete, misshapen or of an unsafe format."""

    code = "E-CHECKPOINT"


class LabelError(NmoeError):
    """Labels are missing, of mixed origin, or cover too little."""

    code = "E-LABEL"


class HeadError(NmoeError):
    """A head is missing, was trained on another backbone, or gives values that are not finite."""

    code = "E-HEAD"


class CalibrationError(NmoeError):
    """Thresholds cannot be fitted, or were fitted for other heads."""

    code = "E-CALIBRATION"


class CurationError(NmoeError):
    """Topics or scores do not match the shards they describe."""

    code = "E-CURATION"


class LockedError(NmoeError):
    """Another process is writing the same output."""

    code = "E-LOCKED"


class DeviceError(NmoeError, RuntimeError):
    """A GPU, or the memory of a device, failed in the middle of work."""

    code = "E-DEVICE"


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise a device's errors, which torch raises as RuntimeError, as DeviceError: its memory ran
    out (E-DEVICE-MEMORY), or it was lost (E-DEVICE-LOST). Any other error is raised as it is."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or _FULL.search(str(error)):
            raise DeviceError(
                "memory ran out",
                found=one_line(error),
                do="take a smaller batch or context (batch_size, max_ctx), moe_backend = "
                '"packed", or a larger device, and run again: what was committed is kept',
                code="E-DEVICE-MEMORY",
            ) from error
        if _LOST.search(str(error)):
            raise DeviceError(
                "the device failed, and this process cannot use it any more",
                found=one_line(error),
                do="look at nvidia-smi and the kernel's log, and run again in a new process: what "
                "was committed is kept",
                code="E-DEVICE-LOST",
            ) from error
        raise
