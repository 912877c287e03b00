"""Errors of the data pipeline, each with the prefix of its codes; see `loader.errors`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from loader.errors import ConfigError as ConfigError
from loader.errors import FormatError as FormatError
from loader.errors import NmoeError as NmoeError
from loader.errors import StateError as StateError
from loader.errors import one_line as one_line
from loader.errors import printable as printable

# Error messages of torch, its libraries and Triton. Compared as text, since of a worker's error
# only the text may be known.
_FULL = re.compile(r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
_LOST = re.compile(r"\b(CUDA|HIP|cuDNN|NCCL) error\b|Triton Error", re.IGNORECASE)


class SourceError(NmoeError):
    """A source is missing or empty, changed while it was read, or has a record that cannot be
    read."""

    code = "E-SOURCE"


class TokenizerError(NmoeError):
    """The vocabulary is missing, or a tokenizer engine or a manifest disagrees with it."""

    code = "E-TOKENIZER"


class CheckpointError(NmoeError):
    """A backbone checkpoint is missing, incomplete, misshapen or of an unsafe format."""

    code = "E-CHECKPOINT"


class LabelError(NmoeError):
    """Labels are missing, come from several oracles, or cover too few documents."""

    code = "E-LABEL"


class HeadError(NmoeError):
    """A head is missing, was trained on another backbone, or returns values that are not finite."""

    code = "E-HEAD"


class CalibrationError(NmoeError):
    """Thresholds cannot be fitted, or were fitted for other heads."""

    code = "E-CALIBRATION"


class CurationError(NmoeError):
    """Topics or scores do not belong to the shards beside them."""

    code = "E-CURATION"


class FunctionError(NmoeError):
    """A function of the user's own failed, exceeded a limit, or is no function of one document."""

    code = "E-FUNCTION"


class LockedError(NmoeError):
    """Another process is writing the same output."""

    code = "E-LOCKED"


class DeviceError(NmoeError, RuntimeError):
    """A GPU failed, or the memory of a device ran out, during a task."""

    code = "E-DEVICE"


@contextmanager
def device_errors() -> Iterator[None]:
    """Turn device errors of torch, which are RuntimeErrors, into DeviceError: memory ran out
    (E-DEVICE-MEMORY), or the device was lost (E-DEVICE-LOST). Other errors are raised unchanged."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or _FULL.search(str(error)):
            raise DeviceError(
                "memory ran out",
                found=one_line(error),
                do="use a smaller batch or context (batch_size, max_ctx), moe_backend = "
                '"packed", or a larger device, and run again: committed shards are kept',
                code="E-DEVICE-MEMORY",
            ) from error
        if _LOST.search(str(error)):
            raise DeviceError(
                "the device failed, and this process can no longer use it",
                found=one_line(error),
                do="check nvidia-smi and the kernel log, and run again in a new process: "
                "committed shards are kept",
                code="E-DEVICE-LOST",
            ) from error
        raise
