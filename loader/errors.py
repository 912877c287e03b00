"""Errors that a user can act on: each class has a stable code and a message of one line.

    NmoeError
    ├── ConfigError      E-CONFIG...       a setting is unknown, missing or out of range
    ├── FormatError      E-SHARD-..., E-INDEX-..., E-MANIFEST-..., E-PATH-..., E-DOCID
    ├── PlanError        E-PLAN...         a loader plan cannot be built or does not match its data
    │                    E-STORE           a store does not return a requested file
    └── StateError       E-STATE..., E-SEEK  a saved position does not belong to this plan

`nmoe_core.base.errors` has more subclasses, for the data pipeline.
"""

import re

# These patterns read untrusted text, so they must take linear time: each pattern consumes the
# characters that it examines, whether it matches or not.
_AFTER_SCHEME = re.compile(r"://[^\s'\"]+")
_LOGIN = re.compile(r"(?<=://)(?:[^/@:]*:.*|[^/]+(?=@|$))")
_SIGNATURE = re.compile(r"(https?://[^\s'\"?]+)(\?[^\s'\"?]*=[^\s'\";,]*)?")
# Control characters except TAB and LF, and direction marks, which a terminal obeys.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Untrusted text for a terminal. Control characters and others that a terminal obeys are
    escaped like `\\u001b`, as in JSON, except TAB and LF."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(error: BaseException) -> str:
    """The message of another package's error as one line of at most 300 characters. Credentials are
    hidden before the message is cut, since half a login would not be recognised as one."""
    return " ".join(without_credentials(str(error)).split())[:300] or type(error).__name__


def without_credentials(text: str) -> str:
    """The text with `user:password@` and the signature, or any other query, of every URL hidden.

    >>> without_credentials("cannot reach https://me:secret@host/v1?sig=abc")
    'cannot reach https://[hidden]@host/v1?[hidden]'
    """
    return _SIGNATURE.sub(_without_signature, _AFTER_SCHEME.sub(_without_login, text))


def _without_login(word: re.Match[str]) -> str:
    before, at, after = word[0].rpartition("@")
    return _LOGIN.sub("[hidden]", before) + at + after


def _without_signature(address: re.Match[str]) -> str:
    return f"{address[1]}?[hidden]" if address[2] else address[0]


class NmoeError(Exception):
    """An error of this package: what failed, where, found and expected values, and the remedy.
    Credentials of URLs are hidden.

    Args:
        what: One clause that names the failure.
        where: The file, key or document.
        do: The next step for the user.
        code: Stable code of this failure; by default the code of the class.
    """

    code = "E-NMOE"

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        found: object = None,
        expected: object = None,
        do: str | None = None,
        code: str | None = None,
    ) -> None:
        self.code = code or type(self).code
        where = getattr(where, "url", where)  # of a path in a bucket
        parts = [what if where is None else f"{where}: {what}"]
        values = (("found", found), ("expected", expected))
        parts.append(", ".join(f"{name} {value}" for name, value in values if value is not None))
        parts.append(do or "")
        text = without_credentials("; ".join(part for part in parts if part))
        super().__init__(printable(text))  # so that it can be logged

    def line(self) -> str:
        """The line that a command prints before it exits with status 1."""
        return f"ERROR [{self.code}]: {' '.join(str(self).split())}"


class ConfigError(NmoeError, ValueError):
    """A setting is unknown, missing or out of range."""

    code = "E-CONFIG"


class AttributeConfigError(ConfigError, AttributeError):
    """An attribute that a framework needs, which an object leaves out on purpose."""


class FormatError(NmoeError, ValueError):
    """A shard, index, manifest or document id does not follow its format."""

    code = "E-FORMAT"


class PlanError(NmoeError, ValueError):
    """A loader plan cannot be built, or does not match its data."""

    code = "E-PLAN"


class StateError(NmoeError, ValueError):
    """A saved loader position belongs to another plan or is out of range."""

    code = "E-STATE"
