"""The places of a run that may hold texts of documents, and the search of their files.

The list is made from the fields of `Tree`: an output without a row here is an error. The places
below are searched for the texts of the takedown record, whatever wrote their files.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from nmoe_core.audit.takedown.find import files_below
from nmoe_core.audit.takedown.search import UNREADABLE, FileSearch
from nmoe_core.base.bucket.paths import shown
from nmoe_core.base.errors import SourceError, one_line
from nmoe_core.config.run import Run
from nmoe_core.config.tree import Tree
from nmoe_core.prep.mixture import SPLITS, run_sources
from nmoe_core.sources.open import open_reader

Facts = dict[str, Any]
_CURATE = "nmoe run curate, after --apply"
_AGAIN = "remove the directory, and make it again"
# What a field of `Tree` may hold of documents, and how it is removed.
_OF_TREE = {
    "data": ("data shards and their kept versions", "prep again, then nmoe versions remove"),
    "curated": ("curated shards", _CURATE),
    "slices": ("ids of documents to label", _AGAIN),
    "labels": ("labels", "nmoe takedown LIST --apply --erase-labels"),
    "heads": ("heads and their features", _AGAIN),
    "calibration": ("calibration", _AGAIN),
    "quality": ("scores", _AGAIN),
    "topics": ("topics and their typical words", _AGAIN),
    "attributes": ("attributes", "nmoe attributes, after prep"),
    "seen": ("the index of nmoe seen", "nmoe seen index, after curation"),
    "plan": ("the loader plan", _CURATE),
    "checkpoint": ("the backbone, which no task of the run writes", "use another checkpoint"),
    "root": ("other files of the run: pictures, reports, exports", _AGAIN),
}
_NEVER = ("checkpoint",)
_EVENTS = "delete the run that the file names; for index.db wipe the asset, then VACUUM"


class Place(NamedTuple):
    """Files that may hold texts of documents."""

    name: str
    paths: tuple[Path, ...]
    remedy: str
    """How the texts are removed."""
    is_searchable: bool = True

    def __str__(self) -> str:
        names = [*map(shown, self.paths)]
        if len(names) > 1:
            names = sorted({shown(path.parent) for path in self.paths})
            names[3:] = [f"and {len(names) - 3} more"] if len(names) > 3 else []
        return f"{self.name} ({', '.join(names) or 'none here'})"


def places(run: Run, also: Iterable[Path] = ()) -> list[Place]:
    """The places of a run, the most specific first, then the directories of `also`."""
    files = tuple(dict.fromkeys(_input_files(run)))
    found = [Place("input files", files, "remove the documents from the source")]
    home = Path(os.environ.get("DAGSTER_HOME", run.base / ".dagster"))
    found.append(Place("Dagster's event log and run databases", (home,), _EVENTS))
    for path in also:
        found.append(Place("given with --everywhere", (path.absolute(),), "remove or replace it"))
    names = [field.name for field in fields(Tree)]
    for name in [*names[1:], names[0]]:  # the root holds the others
        what, remedy = _OF_TREE[name]
        found.append(Place(what, (getattr(run.tree, name),), remedy, name not in _NEVER))
    return found


def _input_files(run: Run) -> Iterator[Path]:
    """The files on this machine that the sources of the run read."""
    for source in run_sources(run):
        for split in SPLITS if source.has_valid else SPLITS[:1]:
            if source.spec.hf_dataset is not None:
                directory = run.base / source.spec.hf_dataset
                yield from [directory] if directory.is_dir() else []
                continue
            try:
                yield from open_reader(source.spec, run.base, split).local_files()
            except SourceError:  # the source is gone, so there is no file to search
                continue


def search_places(
    chosen: Sequence[Place],
    search: FileSearch,
    name_of: Callable[[int], Facts],
    scanned: Collection[Path],
) -> Facts:
    """Search the files of places, except the `scanned` ones. `searched`: the number of files and
    bytes of each place; `found`: the files that have grams of a text, with facts of the text;
    `unreadable`: the files that could not be read, with the reason."""
    facts: Facts = {"searched": [], "found": [], "unreadable": []}
    known = set(map(os.path.realpath, scanned))
    apart = [path for place in chosen if not place.is_searchable for path in place.paths]
    for place in filter(attrgetter("is_searchable"), chosen):
        count = size_bytes = 0
        for path in chain.from_iterable(map(_files, place.paths)):
            real = os.path.realpath(path)
            if real in known or any(path.is_relative_to(other) for other in apart):
                continue
            known.add(real)
            where = {"place": place.name, "path": shown(path)}
            try:
                texts = search.texts_in(path)
                size_bytes += path.stat().st_size
            except UNREADABLE as error:
                facts["unreadable"].append({**where, "reason": one_line(error)})
                continue
            count += 1
            if texts:
                [(text, grams)] = texts.most_common(1)
                counts = {"texts": len(texts), "grams": grams}
                facts["found"].append(where | counts | name_of(text) | {"remedy": place.remedy})
        row = {"place": place.name, "paths": [*map(shown, place.paths)]}
        facts["searched"].append(row | {"files": count, "bytes": size_bytes})
    return facts


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path] if path.exists() else []
    return [file for file in files_below(path) if file.is_file()]
