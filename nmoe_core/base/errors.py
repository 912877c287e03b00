"""Errors of the tasks that make data; the root of the tree is in `loader.errors`.

NmoeError
├── (ConfigError, FormatError, PlanError, StateError: see loader.errors)
├── SourceError        E-SOURCE-...       a source is missing, empty, changed or has a bad record
├── TokenizerError     E-TOKENIZER-...    no vocabulary, or engines and manifests disagree
├── CheckpointError    E-CHECKPOINT-...   a backbone checkpoint is not what it claims to be
├── LabelError         E-LABEL-...        labels are missing, mixed or below coverage
├── HeadError          E-HEAD-...         a head is missing, foreign, or not finite
├── CalibrationError   E-CALIBRATION-...  thresholds cannot be fitted, or belong to other heads
├── CurationError      E-CURATION-...     topics or scores do not match their shards
└── LockedError        E-LOCKED           another process is writing the same output
"""

from __future__ import annotations

from loader.errors import ConfigError, FormatError, NmoeError, PlanError, StateError

__all__ = [
    "CalibrationError",
    "CheckpointError",
    "ConfigError",
    "CurationError",
    "FormatError",
    "HeadError",
    "LabelError",
    "LockedError",
    "NmoeError",
    "PlanError",
    "SourceError",
    "StateError",
    "TokenizerError",
]


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
