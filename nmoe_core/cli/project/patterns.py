"""Finds patterns that match the files of a source, so that files added later are read too.

Uses the widest patterns that match all files of the source, few other files and no held-out files;
the few other files are excluded by name. A file that no pattern can match is left out.
"""

import glob
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from nmoe_core.base.errors import SourceError
from nmoe_core.sources.discover import NUMBER, InputFile, relative
from nmoe_core.sources.formats import split_of, suffixes
from nmoe_core.sources.paths import expand_braces, find_files
from nmoe_core.sources.spec import SourceSpec

_MOST_EXCLUDED = 20


def with_paths(spec: SourceSpec, inputs: Sequence[InputFile], base: Path) -> SourceSpec:
    """Give a source the patterns that match its files among `inputs`."""
    uses = {os.fspath(file.path): file.use for file in inputs}
    ours = [file for file in inputs if file.source == spec.id and file.use in ("train", "valid")]
    names = {
        use: sorted(relative(file.path, base) for file in ours if file.use == use)
        for use in ("train", "valid")
    }
    is_wide = any("/" in file.name for file in ours)
    is_wide = is_wide or len({_cut_number(name)[0] for name in names["train"]}) > 1
    # Files of other splits that appear later beside `train-0.parquet` must not be trained on.
    is_wide = is_wide and not any(split_of(file.path.name) == "train" for file in ours)
    for patterns_of in [_by_directory] * is_wide + [_by_number]:
        paths = {use: tuple(patterns_of(part)) for use, part in names.items()}
        spec = spec.model_copy(update=_as_keys(paths))
        exclude = _excluded(spec, base, uses, names)
        if exclude is not None:
            return spec.model_copy(update={"exclude": exclude})
    for file in ours:
        if not _is_pattern(relative(file.path, base)):
            file.leave_out("its name is not a valid path: rename it")
    plain = {use: tuple(filter(_is_pattern, part)) for use, part in names.items()}
    return spec.model_copy(update=_as_keys(plain))


def _as_keys(paths: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {"paths": paths["train"], "valid_paths": paths["valid"]}


def _excluded(
    spec: SourceSpec, base: Path, uses: dict[str, str], names: dict[str, list[str]]
) -> tuple[str, ...] | None:
    """Patterns that exclude the few other files that the source's patterns match. None if the
    source's patterns match too many other files, a held-out file, or not all files of the
    source."""
    others: set[str] = set()
    ours: set[str] = set()
    for use, patterns in (("train", spec.paths), ("valid", spec.valid_paths)):
        if not all(map(_is_pattern, patterns)):
            return None
        try:
            files = find_files(patterns, base)
        except SourceError:  # raised, for example, for links that form a loop
            return None
        wanted = {os.path.abspath(base / name) for name in names[use]}
        found = {os.path.abspath(file.path): file.name for file in files}
        more = found.keys() - wanted
        if wanted - found.keys() or any(uses.get(path) in ("valid", "test") for path in more):
            return None
        others |= {found[path] for path in more}
        ours |= {found[path] for path in wanted}
    if len(others) > _MOST_EXCLUDED or others & ours:
        return None
    return tuple(glob.escape(name) for name in sorted(others))


def _by_directory(names: Iterable[str]) -> Iterator[str]:
    """Patterns that match all files with a suffix below their common directory."""
    by_suffix: dict[str, list[str]] = defaultdict(list)
    for name in names:
        by_suffix["".join(suffixes(name))].append(name)
    for suffix, group in by_suffix.items():
        prefix = os.path.commonpath([os.path.dirname(name) for name in group])
        is_deep = any("/" in name[len(prefix) + 1 :] for name in group)
        yield f"{prefix}{'/' if prefix else ''}{'**/' if is_deep else ''}*{suffix}"


def _by_number(names: Iterable[str]) -> Iterator[str]:
    """Patterns for files in a directory whose names differ by a number; other files are listed by
    name."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        start, mark, suffix = _cut_number(name)
        # Without a separator before the number (`a1`, `a2`), `a*` would be too wide.
        pattern = f"{start}{mark}{'*' if mark else '[0-9]*'}{suffix}"
        is_plain = start + mark == name.removesuffix(suffix) or glob.has_magic(start)
        groups[name if is_plain else pattern].append(name)
    yield from groups


def _cut_number(name: str) -> tuple[str, str, str]:
    """Split a name at its number into start, separator and suffixes, such as `web/a`, `-`,
    `.jsonl.gz`."""
    suffix = "".join(suffixes(name))
    directory, slash, stem = name.removesuffix(suffix).rpartition("/")
    number = NUMBER.search(stem)
    start = stem[: number.start()] if number else stem
    return f"{directory}{slash}{start}", number[1] if number else "", suffix


def _is_pattern(name: str) -> bool:
    """Whether the configuration can contain the name, and a source finds the file by this name."""
    try:
        return expand_braces(name.encode().decode()) == [name] and "://" not in name
    except UnicodeEncodeError:
        return False
