"""Flags beside `--config`: each replaces a value of the run, or is refused; none is ignored.

A verb that takes `--config` instead of paths says with `beside_config` which of its flags name a
key of the run configuration, and which it uses itself. All others belong to the form without a run.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence

from nmoe_core.base.errors import ConfigError
from nmoe_core.config.run import Run

BACKBONE_KEYS = {name: f"backbone.{name}" for name in ("device", "dtype", "experts")}
_ALWAYS = ("config", "json", "traceback")


def beside_config(
    parser: argparse.ArgumentParser,
    keys: Mapping[str, str] | None = None,
    used: Collection[str] = (),
) -> None:
    """Say what the flags of a verb do beside `--config`.

    Args:
        parser: Of the verb.
        keys: Dotted key of the run configuration by the name of the flag that replaces it; `not `
            before the key of a flag that turns it off.
        used: Flags that the verb uses with a run too.
    """
    parser.set_defaults(beside_config=(dict(keys or {}), frozenset(used)))


def require_no_ignored_flag(arguments: argparse.Namespace, argv: Sequence[str]) -> None:
    """Keep the run's values that flags replace, for `configured_run`.

    Raises:
        ConfigError: A flag was given that a run has no use for.
    """
    if getattr(arguments, "config", None) is None or not hasattr(arguments, "beside_config"):
        return
    keys, used = arguments.beside_config
    arguments.replaced = {}
    for name in _given(argv, vars(arguments)):
        if name in keys:
            value = getattr(arguments, name)
            is_negated = keys[name].startswith("not ")
            arguments.replaced[keys[name].removeprefix("not ")] = not value if is_negated else value
        elif name not in used and name not in _ALWAYS:
            raise ConfigError(
                f"{_flag(name)} is not used with --config: the run says it",
                found=f"{_flag(name)} beside --config {arguments.config}",
                expected=", ".join(map(_flag, (*keys, *sorted(used)))) or "no other flag",
                do="leave it out, or leave out --config and name the paths",
            )


def configured_run(arguments: argparse.Namespace) -> Run:
    """The run of `--config` with the values of the flags beside it.

    Raises:
        ConfigError: As `Run`; or a value is out of range.
    """
    return Run(arguments.config, getattr(arguments, "replaced", {}))


def _given(argv: Sequence[str], names: Collection[str]) -> list[str]:
    """The names whose flags are on the command line, in full or shortened as argparse allows."""
    tokens = [token.split("=", 1)[0] for token in argv if token.startswith("--")]
    flags = {_flag(name): name for name in names}
    given = [flag for flag in flags if flag in tokens]
    short = [token for token in tokens if token not in flags and token != "--"]
    given += [flag for flag in flags for token in short if flag.startswith(token)]
    return [flags[flag] for flag in dict.fromkeys(given)]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
