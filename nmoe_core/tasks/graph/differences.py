"""Compares the recorded inputs of an output with its current inputs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.tasks.graph.settings import Settings

Kind = Literal["setting", "input", "code", "files"]
_CODE = ("code", "format")
_NAMED = {
    "tokenizer": "tokenizer",
    "families": "calibration.family",
    "model_tokenizer": "tokenizer of the backbone",
    "eos_token_id": "prep.eos_token",
    "bos_token_id": "prep.bos_token",
    "dtype": "prep.dtype",
    "experts": "backbone.moe_backend",
    "evaluations": "contamination.evaluations",
    "rubric": "oracle.rubric",
}
_LISTS: dict[str, Any] = {"transforms": [], "attributes.columns": []}
_MAX_CHARS = 60


class Change(NamedTuple):
    """One reason why an output would be made again.

    `name`: the key of the setting or input; `then`, `now`: its values, None if not recorded.
    """

    kind: Kind
    name: str
    then: Any = None
    now: Any = None

    def __str__(self) -> str:
        if self.kind == "setting":
            return f"{self.name}: {_short(self.then)} -> {_short(self.now)}"
        return f"input {self.name}" if self.kind == "input" else self.name


def _short(value: Any) -> str:
    text = "not recorded" if value is UNKNOWN else "not set" if value is None else str(value)
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 3]}..."


UNKNOWN = object()  # stands for a value that an output does not record


@dataclass(frozen=True, slots=True)
class Look:
    """The recorded and the current inputs of an output.

    Attributes:
        then: The recorded fingerprints; None if the output does not exist.
        now: The current fingerprints.
        settings_then: The recorded settings, by the keys of the configuration.
        settings_now: The current settings.
        inputs: Name of a fingerprint -> key of the input whose digest it is.
        named: Name of a fingerprint -> key of the setting whose value or digest it is.
        damage: What is wrong with the files; empty if they are undamaged.
    """

    then: Fingerprints | None
    now: Fingerprints
    settings_then: Settings = field(default_factory=dict)
    settings_now: Settings = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=lambda: _NAMED)
    damage: str = ""

    def changes(self) -> list[Change]:
        """Why the output is not current; empty if it is current. The output must exist."""
        then = self.then or {}
        differing = [key for key in {**self.now, **then} if then.get(key) != self.now.get(key)]
        inputs: list[Change] = []
        named: list[Change] = []
        others: list[str] = []
        for key in differing:
            if key in _CODE:
                inputs.append(Change("code", f"code {then.get(key)} -> {self.now.get(key)}"))
            elif key in self.inputs:
                inputs.append(Change("input", self.inputs[key]))
            elif key in self.named:
                named.append(Change("setting", self.named[key], then.get(key), self.now.get(key)))
            else:
                others.append(key)
        found: list[Change] = []
        if named or others:
            found = changed_settings(self.settings_then, self.settings_now)
            told = {change.name for change in found}
            found += [change for change in named if change.name not in told]
            found = found or [Change("setting", "settings", UNKNOWN, UNKNOWN)]
        found += inputs
        if not found and self.damage:
            found.append(Change("files", self.damage))
        return unique(found)


def unique(changes: Iterable[Change]) -> list[Change]:
    """The first change of each kind and name."""
    found: dict[tuple[str, str], Change] = {}
    for change in changes:
        found.setdefault((change.kind, change.name), change)
    return list(found.values())


def changed_settings(then: Settings, now: Settings) -> list[Change]:
    """The settings that differ. A setting that the output does not record does not count as
    different, except lists that are recorded only if they have items."""
    absent = _LISTS if then else {}
    old = {**absent, **then}
    new = {**absent, **now}
    changes: list[Change] = []
    for key, value in new.items():
        if key in old and _plain(old[key]) != _plain(value):
            changes.append(Change("setting", key, old[key], value))
    return changes


def _plain(value: Any) -> Any:
    """A value after a round trip through JSON."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
