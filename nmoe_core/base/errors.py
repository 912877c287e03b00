"""Errors of the tasks that make data, each with the stem of its codes; see `loader.errors`."""

from loader.errors import ConfigError as ConfigError
from loader.errors import FormatError as FormatError
from loader.errors import NmoeError as NmoeError
from loader.errors import StateError as StateError
from loader.errors import one_line as one_line


class SourceError(NmoeError):
    """A source is missing, empty, changed under us, or holds a record that cannot be read."""

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
