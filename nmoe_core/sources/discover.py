"""The sources that lie at a path: a directory, a file, or a hub dataset.

Files of one kind below one directory are one source, and so are files beside each other whose names
differ in numbers alone. Plain text is taken only where there are no records.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from nmoe_core.base.errors import SourceError
from nmoe_core.sources.spec import SourceSpec
from nmoe_core.sources.storage import COMPRESSED, is_url

# Kinds by suffix, in the order of preference: those of the first tier that occurs are taken.
_TIERS = (
    {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "arrow"},
    {".json": "jsonl"},
    {".txt": "files", ".md": "files", ".rst": "files", ".tex": "files"},
)
OUTPUT = "out"  # the root of a new project's run
_SAVED = ("dataset_dict.json", "state.json")  # what `datasets` writes by save_to_disk
_NUMBER = re.compile(r"[\W_]*\d[\d\W_]*(of[\d\W_]*)?$")


def discover(named: str, base: Path, subset: str | None = None) -> list[SourceSpec]:
    """The sources at a path or URL, or of a hub id and perhaps a subset of it. Relative paths, of
    the specs too, start at `base`. Raises SourceError: there is no text (E-SOURCE-NOTFOUND)."""
    path = base / named
    if is_url(named):
        kind: Any = _kind(Path(named))
        return [SourceSpec(id=_id(_stem(Path(named))), kind=kind, paths=(named,))]
    if path.is_file():
        return [_spec(_stem(path), [path], base)]
    if not path.is_dir():
        if re.fullmatch(r"\w[\w.-]*/[\w.-]+", named):
            return [
                SourceSpec(id=_id(named.rpartition("/")[2]), hf_dataset=named, hf_subset=subset)
            ]
        raise SourceError(
            "no such directory or file, and no id of a hub dataset",
            where=named,
            do="name a directory, a .jsonl or .parquet file, or owner/name",
            code="E-SOURCE-NOTFOUND",
        )
    if any((path / name).is_file() for name in _SAVED):
        return [SourceSpec(id=_id(path.resolve().name), hf_dataset=_relative(path, base))]
    files = _files(path, base / OUTPUT)
    groups: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for file in files:
        inner = file.relative_to(path).parts
        name = inner[0] if len(inner) > 1 else _NUMBER.sub("", _stem(file)) or path.resolve().name
        groups[name, _kind(file)].append(file)
    if not groups:
        raise SourceError(
            "no text here",
            where=path,
            expected=", ".join(suffix for tier in _TIERS for suffix in tier) + ", also .gz, .zst",
            code="E-SOURCE-NOTFOUND",
        )
    specs: dict[str, SourceSpec] = {}
    for (name, kind), group in groups.items():
        taken = _id(name) in specs
        is_dir = len(group[0].relative_to(path).parts) > 1
        spec = _spec(f"{name}_{kind}" if taken else name, group, base, files, is_dir)
        specs[spec.id] = spec
    return list(specs.values())


def _files(top: Path, output: Path) -> list[Path]:
    """Files of text below a directory, but for hidden directories, Python environments and what a
    run made."""
    found = []
    for directory, inner, names in os.walk(top):
        here = Path(directory)
        is_other = {n: (here / n / "pyvenv.cfg").is_file() or here / n == output for n in inner}
        inner[:] = sorted(n for n in inner if n[0] != "." and not is_other[n])
        found += [here / name for name in sorted(names) if name[0] != "."]
    for tier in _TIERS:
        if files := [file for file in found if _suffixes(file)[0] in tier]:
            return files
    return []


def _spec(
    name: str, files: Sequence[Path], base: Path, others: Sequence[Path] = (), is_dir: bool = False
) -> SourceSpec:
    kind: Any = _kind(files[0])
    ours, all_files = ([_relative(file, base) for file in part] for part in (files, others))
    return SourceSpec(id=_id(name), kind=kind, paths=tuple(_patterns(ours, all_files, is_dir)))


def _patterns(files: Sequence[str], others: Sequence[str], is_dir: bool) -> Iterator[str]:
    """A pattern per suffix that names these files and no others; else the files themselves. That of
    a directory also names files that come into it later."""
    by_suffix: dict[str, list[str]] = defaultdict(list)
    for file in files:
        by_suffix["".join(_suffixes(Path(file)))].append(file)
    for suffix, group in by_suffix.items():
        prefix = _common([file.removesuffix(suffix) for file in group])
        is_deep = any("/" in file[len(prefix) :] for file in group)
        if is_deep or is_dir:
            prefix = prefix.rpartition("/")[0] + ("/**/" if is_deep else "/")
        prefix = prefix.rstrip("0123456789")
        loose = prefix.replace("**/", "*") + "*" + suffix  # its `*` also takes slashes
        matched = {file for file in others if fnmatchcase(file, loose)}
        is_pattern = (
            (is_dir or len(group) > 1)
            and matched == set(group)
            and not re.search(r"[\[\]{}?]", prefix)
        )
        yield from [f"{prefix}*{suffix}"] if is_pattern else group


def _common(names: Sequence[str]) -> str:
    """The characters that all names begin with."""
    first, last = min(names), max(names)
    return first[: next((i for i, c in enumerate(first) if c != last[i : i + 1]), len(first))]


def _kind(file: Path) -> str:
    suffix = _suffixes(file)[0]
    found = next((tier[suffix] for tier in _TIERS if suffix in tier), None)
    if found is None:
        raise SourceError(
            "not a file of text",
            where=file,
            expected=", ".join(suffix for tier in _TIERS for suffix in tier) + ", also .gz, .zst",
            code="E-SOURCE-NOTFOUND",
        )
    return found


def _suffixes(file: Path) -> tuple[str, str]:
    """The suffix of the content and that of its compression: `.jsonl`, `.zst`."""
    outer = file.suffix if file.suffix in COMPRESSED else ""
    return Path(file.name.removesuffix(outer)).suffix, outer


def _stem(file: Path) -> str:
    return file.name.removesuffix("".join(_suffixes(file)))


def _relative(path: Path, base: Path) -> str:
    path, base = Path(os.path.abspath(path)), Path(os.path.abspath(base))
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else path.as_posix()


def _id(name: str) -> str:
    """The name of a source: letters, digits and underscores."""
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_") or "documents"
