"""Finds the sources at a path: a directory, a file, or a hub dataset.

Every file below a directory gets one of three uses: training data; held out, because its name marks
a validation or test split; or left out, with a reason. Files of one kind below one directory form
one source, and so do files in the same directory whose names differ only in numbers.
"""

import json
import os
import re
import stat
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

from loader.files.regular import read_file
from nmoe_core.base.errors import SourceError
from nmoe_core.base.jsonl import encodable
from nmoe_core.sources.formats import (
    EXPECTED,
    Split,
    kind_of,
    split_of,
    suffixes,
    why_unread,
    without_split,
)
from nmoe_core.sources.spec import SourceSpec
from nmoe_core.sources.storage import is_url, path_text

Use = Split | Literal["left out"]
OUTPUT = "out"  # root directory of the run of a new project
PROJECT = "nmoe.toml"
_SAVED = ("dataset_dict.json", "state.json")  # files that `save_to_disk` of `datasets` writes
NUMBER = re.compile(r"(?<![\d\W_])([\W_]*)\d[\d\W_]*(of[\d\W_]*)?$")
_PACKAGES = ("node_modules", "__pycache__")
_ABOUT = re.compile(r"(?i)(readme|licen[cs]e|copying|notice|citation|changelog|contributing)\b.*")
_SAYS_ABOUT = "a file about the data, beside the data"
_MOST_AT_TOP = 16  # maximum number of sources made of files in the directory itself


@dataclass(slots=True)
class InputFile:
    """A file and its use."""

    path: Path
    name: str
    """Path relative to the searched directory."""
    size_bytes: int
    use: Use = "train"
    reason: str = ""
    """Reason why it is not training data."""
    source: str | None = None

    def leave_out(self, reason: str) -> None:
        """Use the file neither for training nor for validation."""
        self.use = "left out"
        self.reason = encodable(" ".join(reason.split()))


@dataclass(slots=True)
class Inputs:
    """The inputs at a path: files, and sources; the patterns and text fields of the sources are not
    set yet."""

    specs: list[SourceSpec]
    files: list[InputFile]


def discover(
    named: str,
    base: Path,
    subset: str | None = None,
    known: Collection[Path] = (),
    taken: Collection[str] = (),
) -> Inputs:
    """Find the sources at a path, a URL, or a hub id with an optional subset. Relative paths, also
    in the specs, are relative to `base`. `known` files are not added to a new source, and `taken`
    names are not used again. Raises SourceError if there is nothing to read (E-SOURCE-NOTFOUND)."""
    path = Path(os.path.abspath(base / named))
    if is_url(named):
        kind: Any = _kind(named)
        name = new_id(_stem(named), kind, taken)
        return Inputs([SourceSpec(id=name, kind=kind, paths=(named,))], [])
    if path.is_file():
        _kind(path.name)
        files = [InputFile(path, path_text(Path(path.name)), path.stat().st_size)]
        return Inputs(_grouped(files, path.parent, base, taken), files)
    if not path.is_dir():
        if re.fullmatch(r"\w[\w.-]*/[\w.-]+", named):
            name = new_id(named.rpartition("/")[2], "hub", taken)
            return Inputs([SourceSpec(id=name, hf_dataset=named, hf_subset=subset)], [])
        raise SourceError(
            "not an existing directory or file, and not the id of a hub dataset",
            where=named,
            do="name a directory, a .jsonl or .parquet file, or owner/name",
            code="E-SOURCE-NOTFOUND",
        )
    files = _seen(path, base / OUTPUT)
    if any((path / name).is_file() for name in _SAVED):
        specs = [_saved(path, base, files)]
    else:
        new = [file for file in files if file.path not in known]
        specs = _grouped(new, path, base, taken)
    for file in files:
        if file.use in ("valid", "test"):
            file.reason = f"its name marks the {file.use} split"
    return Inputs(specs, files)


def _seen(top: Path, output: Path) -> list[InputFile]:
    """All files below a directory; files that no source can read get the use "left out"."""
    files: list[InputFile] = []
    reasons = {os.fspath(top): ""}
    refused: list[OSError] = []
    for directory, inner, names in os.walk(top, onerror=refused.append):
        inner.sort()
        for name in inner:
            path = Path(directory, name)
            reasons[os.path.join(directory, name)] = reasons[directory] or _why_not_in(path, output)
            if path.is_symlink():
                names.append(name)
        for name in sorted(names):
            with suppress(FileNotFoundError):  # the file was deleted in the meantime
                files.append(_seen_file(Path(directory, name), top, reasons[directory]))
    for error in refused:
        path = Path(os.fsdecode(error.filename))
        file = InputFile(path, path_text(path.relative_to(top)), 0)
        file.leave_out(f"a directory that cannot be listed: {error.strerror}")
        files.append(file)
    if any(file.use != "left out" and kind_of(file.name) != "files" for file in files):
        for file in files:
            if file.use != "left out" and _ABOUT.fullmatch(file.path.name):
                file.leave_out(_SAYS_ABOUT)
    return files


def _seen_file(path: Path, top: Path, reason: str) -> InputFile:
    status = path.lstat()
    file = InputFile(path, path_text(path.relative_to(top)), status.st_size)
    if reason := reason or _why_not(path, status):
        file.leave_out(reason)
    elif (split := split_of(file.name.removesuffix("".join(suffixes(file.name))))) is not None:
        file.use = split
    return file


def _why_not_in(directory: Path, output: Path) -> str:
    """The reason why all files below a directory are left out."""
    if directory.name.startswith("."):
        return f"below the hidden directory {path_text(Path(directory.name))}"
    if directory == output:
        return "output of a run"
    if directory.name in _PACKAGES or os.path.isfile(directory / "pyvenv.cfg"):
        return "installed packages"
    return ""


def _why_not(path: Path, status: os.stat_result) -> str:
    if stat.S_ISLNK(status.st_mode):
        return "a symbolic link"
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    if path.name == PROJECT:
        return "the configuration of the project"
    if path.name.startswith("."):
        return "hidden"
    if kind_of(path.name) is None:
        return why_unread(path_text(Path(path.name)))
    if not status.st_size:
        return "empty"
    return "" if os.access(path, os.R_OK) else "permission denied"


def _saved(top: Path, base: Path, files: Iterable[InputFile]) -> SourceSpec:
    """The source of a directory that `save_to_disk` wrote; its splits are subdirectories."""
    splits: Any = ()
    with suppress(OSError, ValueError, AttributeError):
        splits = json.loads(read_file(top / _SAVED[0])).get("splits", ())
    valid = next((name for name in splits if split_of(name) == "valid"), None)
    spec = SourceSpec(id=as_id(top.name), hf_dataset=relative(top, base), hf_valid_split=valid)
    for file in files:
        file.source = spec.id
        if file.use == "left out":
            continue
        if kind_of(file.name) != "arrow":
            file.leave_out(_SAYS_ABOUT)
        elif splits:
            first = file.name.partition("/")[0]
            file.use = "train" if first == "train" else "valid" if first == valid else "test"
    return spec


def _grouped(
    files: Iterable[InputFile], top: Path, base: Path, taken: Collection[str]
) -> list[SourceSpec]:
    """Group files into sources and set their names. A group without training files makes no
    source."""
    groups: dict[tuple[bool, str, str], list[InputFile]] = defaultdict(list)
    for file in files:
        if file.use != "left out":
            first, slash, _ = file.name.partition("/")
            name = without_split(first if slash else NUMBER.sub("", _stem(file.name)))
            name = name if slash else NUMBER.sub("", name)
            groups[not slash, name or top.name, _kind(file.name)].append(file)
    is_many = sum(is_at_top for is_at_top, _, _ in groups) > _MOST_AT_TOP
    merged: dict[tuple[str, Any], list[InputFile]] = defaultdict(list)
    for (is_at_top, name, kind), group in groups.items():
        merged[top.name if is_at_top and is_many else name, kind] += group
    specs: dict[str, SourceSpec] = {}
    for (name, kind), group in merged.items():
        trained = [relative(file.path, base) for file in group if file.use == "train"]
        if trained:
            named = new_id(name, kind, {*specs, *taken})
            specs[named] = SourceSpec(id=named, kind=kind, paths=tuple(trained[:1]))
            for file in group:
                file.source = named
    return list(specs.values())


def _kind(name: str) -> str:
    if (kind := kind_of(name)) is None:
        raise SourceError(
            "not a file that can be read as text",
            where=name,
            expected=EXPECTED,
            code="E-SOURCE-NOTFOUND",
        )
    return kind


def _stem(name: str) -> str:
    return Path(name).name.removesuffix("".join(suffixes(name)))


def relative(path: Path, base: Path) -> str:
    """The path relative to `base`, or the whole path if it is not below `base`."""
    path = Path(os.path.abspath(path))
    base = Path(os.path.abspath(base))
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else path.as_posix()


def new_id(name: str, kind: str, taken: Collection[str]) -> str:
    """An unused source name of letters, digits and underscores."""
    plain = as_id(name)
    for found in (plain, f"{plain}_{kind}"):
        if found not in taken:
            return found
    return next(found for n in count(2) if (found := f"{plain}_{kind}_{n}") not in taken)


def as_id(name: str) -> str:
    """The name as letters, digits and underscores."""
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_") or "documents"
