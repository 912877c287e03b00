"""Flags of verbs that work on a run: each sets a configuration key or a directory of the run.

With `--config`, flags override the file; without it, the flags are the whole configuration. In both
cases `run_of` returns a checked `Run`.
"""

import argparse
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from loader.files.addresses import is_url, path_argument
from loader.plan.tables import PROJECT_FILE as PROJECT_FILE
from nmoe_core.base.errors import ConfigError, NmoeError
from nmoe_core.config.cache import checkpoint_dir
from nmoe_core.config.renamed import RENAMED
from nmoe_core.config.run import Run
from nmoe_core.config.schema import Key, run_keys, setting

_FILES = ("input_docids", "input_jsonl", "out", "predictions")
_FILES += ("labels", "labels_val", "labels_test")
_PUBLISHED = ("--max-batch",)  # a published name, which gives no warning
_ROOTS = {
    "data": "directory of token shards",
    "slices": "directory of slices",
    "labels": "directory of labels: train/, val/",
    "heads": "directory of the heads",
    "calibration": "directory of the thresholds",
    "quality": "directory of the grades",
}


def add_run_flags(
    parser: argparse.ArgumentParser,
    keys: Iterable[str] = (),
    roots: Mapping[str, str] | None = None,
    *,
    is_required: bool = False,
    **renamed: str,
) -> None:
    """Add `--config`, `--set`, flags for `keys` and flags for `roots`. The flag of a key is the
    last part of its dotted name, or its name in `renamed` (flag=key). `roots` maps the flag of a
    directory to the `Tree` attribute that it replaces. `is_required`: the verb needs a run; without
    `--config`, the run is the project of the working directory."""
    named = {key.rpartition(".")[2]: key for key in keys} | renamed
    roots = dict(roots or {})
    group = parser.add_argument_group("the run", "flags override what --config says")
    group.add_argument(
        "--config",
        metavar="TOML",
        help="configuration file or a bundled one: demo, moonlet"
        + f" (default: {PROJECT_FILE} in this directory)" * is_required,
    )
    add_keys(group, {name: run_keys()[key] for name, key in named.items()})
    for name, root in roots.items():
        group.add_argument(flag_of(name), type=Path, metavar="DIR", help=_ROOTS[root])
    group.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="set any configuration key, such as compute.workers=4; repeatable",
    )
    parser.set_defaults(keys=named, roots=roots, needs_run=is_required)


def run_of(
    arguments: argparse.Namespace,
    *needed: str,
    defaults: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> Run:
    """The run that the command line describes. Raises the errors of `Run`.

    Args:
        arguments: Arguments of a verb with `add_run_flags`.
        needed: Flags that are required without `--config`.
        defaults: Values by dotted key, used without `--config`.
        more: Values by dotted key that the verb read from its other arguments.
    """
    settings: dict[str, Any] = {}
    config = arguments.config
    if config is None and arguments.needs_run:
        config = project_file()
    if config is None:
        for name in needed:
            required(arguments, name)
        settings |= defaults or {}
    for name, key in arguments.keys.items():
        if (value := getattr(arguments, name)) is not None:
            if isinstance(value, Path):
                is_checkpoint = key.endswith(".checkpoint")
                here = Path.cwd()
                value = str(checkpoint_dir(here, str(value)) if is_checkpoint else here / value)
            settings[key] = value
    settings |= more or {}
    settings |= dict(map(setting, arguments.settings))
    given = {root: getattr(arguments, name) for name, root in arguments.roots.items()}
    roots = {root: path for root, path in given.items() if path is not None}
    return Run(config, settings, roots)


def path_or_url(text: str) -> Path:
    """The path in an argument: on this machine, or in the bucket of a run. Raises
    ArgumentTypeError for another URL."""
    if is_url(text):
        from nmoe_core.base.bucket.bucket import path_at

        try:
            found = path_at(text)
        except NmoeError as error:
            raise argparse.ArgumentTypeError(error.line()) from None
        if found is None:
            raise argparse.ArgumentTypeError(
                f"[E-PATH-URL] no run keeps files in this directory of a store; found {text!r},"
                " expected a path, or a URL of a plan, a manifest or its directory in a run's root"
            )
        return found
    return path_argument(text)


def apply_default_config(arguments: argparse.Namespace) -> None:
    """Use the project of the working directory, unless the command line names a configuration, a
    directory, or a file of documents or labels."""
    is_task = getattr(arguments, "is_task", False)
    if is_task and arguments.config is None and Path(PROJECT_FILE).is_file():
        named = (*arguments.roots, *_FILES)
        if all(getattr(arguments, name, None) is None for name in named):
            arguments.config = PROJECT_FILE


def project_file() -> Path:
    """The project file in the working directory. Raises ConfigError if it does not exist."""
    path = Path(PROJECT_FILE)
    if not path.is_file():
        raise ConfigError(
            f"no {PROJECT_FILE} in this directory, and no --config",
            where=Path.cwd(),
            do="run `nmoe init` here, or name the configuration of a run with --config",
            code="E-CONFIG-MISSING",
        )
    return path


def set_value(arguments: argparse.Namespace, key: str) -> str | None:
    """The text that `--set` gives a key; None if `--set` does not name the key."""
    return dict(text.partition("=")[::2] for text in arguments.settings).get(key)


def required(arguments: argparse.Namespace, name: str) -> Any:
    """The value of a flag that this use of the verb requires. Raises ConfigError if it is
    missing."""
    value = getattr(arguments, name)
    if value is None:
        raise ConfigError(
            f"{flag_of(name)} is missing", do=f"add {flag_of(name)}, or --config of a run"
        )
    return value


def model_defaults(arguments: argparse.Namespace, table: str) -> dict[str, str]:
    """The default device of a model: a GPU if available."""
    import torch

    device = set_value(arguments, f"{table}.device")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return {f"{table}.device": device, f"{table}.dtype": default_dtype(device)}


def default_dtype(device: str) -> str:
    """float32 on a CPU, where bfloat16 is slow; else bfloat16."""
    return "float32" if device == "cpu" else "bfloat16"


def number(least: int) -> Any:
    """The argparse type of an integer flag with the minimum `least`."""

    def whole_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return whole_number


def add_keys(parser: Any, keys: Mapping[str, Key]) -> None:
    """Add the flags of `keys` (flag name to key); a flag that is not given has the value None."""
    for name, key in keys.items():
        if key.annotation is bool:
            flag = flag_of(f"no_{name}" if key.default else name)
            text = _lower(key.help)
            text = f"do not {text}" if key.default else text
            const = {"action": "store_const", "const": not key.default}
            parser.add_argument(flag, dest=name, help=text, **const)
            continue
        has_default = isinstance(key.default, (str, int, float)) and "default" not in key.help
        default = f" (default {key.default})" if has_default else ""
        several = {"nargs": "+", "action": "extend"} if key.is_list else {}
        action = parser.add_argument(
            flag_of(name),
            type=Path if key.is_path else _argument_of(key),
            choices=key.choices or None,
            metavar=None if key.choices else "PATH" if key.is_path else name.upper(),
            help=_lower(key.help) + default,
            **several,
        )
        add_earlier_flags(parser, action, key.name)


class EarlierFlag(argparse.Action):
    """A flag under an earlier name: does the same, and warns unless the published documents use
    that name."""

    def __init__(self, *args: Any, of: argparse.Action, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"nargs": of.nargs})
        self._of = of

    def __call__(self, parser: Any, namespace: Any, values: Any, name: str | None = None) -> None:
        if name not in _PUBLISHED:
            text = f"{name} is now {self._of.option_strings[0]}; this release still accepts it"
            warnings.warn(text, FutureWarning, stacklevel=2)
        self._of(parser, namespace, values, name)


def add_earlier_flags(parser: Any, action: argparse.Action, key: str) -> None:
    """Accept the earlier names of a flag's key too; the help does not show them."""
    for old in (old for old, new in RENAMED.items() if new == key):
        parser.add_argument(
            flag_of(old.rpartition(".")[2]),
            action=EarlierFlag,
            of=action,
            dest=action.dest,
            type=action.type,
            choices=action.choices,
            help=argparse.SUPPRESS,
        )


def _argument_of(key: Key) -> Callable[[str], Any]:
    def value(text: str) -> Any:
        try:
            return key.one(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return value


def _lower(text: str) -> str:
    """Lower the first letter, as in argparse's help texts; `URL` and `MoE` keep their capitals."""
    first = text.partition(" ")[0][1:]
    text = text[:1].lower() + text[1:] if first == first.lower() else text
    return text.rstrip(".").replace("%", "%%")


def flag_of(name: str) -> str:
    """`--data-root` of `data_root`."""
    return f"--{name.replace('_', '-')}"
