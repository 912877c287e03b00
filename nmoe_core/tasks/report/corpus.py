"""The corpus that the report page describes, and the sections of the page."""

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from loader.files.format import Manifest, load_manifest
from loader.plan.tables import PROJECT_FILE
from nmoe_core.base.errors import NmoeError, one_line
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.curate.shards.combine import repeats_of
from nmoe_core.prep.mixture import run_sources
from nmoe_core.quality.calibration.graded import SUMMARY_NAME
from nmoe_core.report.html import Html, element, joined, note
from nmoe_core.tasks.report.columns import MOST_DRAWN

# Errors of reading a file that is damaged or has another version.
UNREADABLE = (NmoeError, OSError, ValueError, KeyError)


def readable_manifest(path: Path) -> Manifest | None:
    """A manifest; None if it is missing or damaged, which another section of the page reports."""
    try:
        return load_manifest(path)
    except UNREADABLE:
        return None


@dataclass(frozen=True, slots=True)
class Corpus:
    """A run, and its sources by size, largest first."""

    run: Run
    sources: list[str]

    @classmethod
    def of(cls, run: Run) -> "Corpus":
        """The corpus of a run; files of the corpus may still be missing."""
        names = [source.name for source in run_sources(run)]
        made = {name: readable_manifest(run.tree.manifest(name)) for name in names}
        sizes = {name: one.total_tokens for name, one in made.items() if one is not None}
        return cls(run, sorted(names, key=lambda name: -sizes.get(name, 0)))

    @property
    def name(self) -> str:
        """The name of the project's directory, else of the configuration without its suffix."""
        path = self.run.path.absolute()
        return path.parent.name if path.name == PROJECT_FILE else path.stem

    @property
    def drawn(self) -> list[str]:
        """The sources that pictures show; tables show all sources."""
        return self.sources[:MOST_DRAWN]

    def shards(self) -> Iterator[ShardPaths]:
        """The training shards of every source."""
        for name in self.sources:
            yield from self.run.tree.shards(name, self.run.config.prep.num_shards)

    def manifests(self) -> list[Path]:
        """Paths of the manifests of the training splits."""
        return [self.run.tree.manifest(name) for name in self.sources]

    def graded(self) -> list[Path]:
        """Summaries of grades."""
        return [shard.graded / SUMMARY_NAME for shard in self.shards()]

    def curated(self) -> list[Path]:
        """Manifests of curated shards."""
        return [self.run.tree.curated_manifest(name) for name in self.sources]

    def outcomes(self) -> list[Path]:
        """The files that decide which documents are kept."""
        rules = self.run.config.curation.rules
        return self.graded() + [one.selection for one in self.shards() if rules(one.source)]

    def planned(self) -> list[Path]:
        """The loader plan, and the files it needs."""
        return [*self.curated(), *self.outcomes(), self.run.tree.plan]

    def attribute(self, name: str) -> list[Path]:
        """Files of an attribute."""
        return [shard.attribute(name) for shard in self.shards()]


def kept_of(run: Run, source: str) -> tuple[int, int, int] | None:
    """The curated documents of a source and their tokens, each document once, and the tokens of
    one pass, which differ if documents are repeated; None if a file is missing or damaged."""
    manifest = readable_manifest(run.tree.curated_manifest(source))
    if manifest is None:
        return None
    repeats = (0, 0)
    if run.config.curation.repeat is not None:
        try:
            repeats = repeats_of(run.tree, source)
        except UNREADABLE:
            return None
    documents = manifest.total_documents - repeats[0]
    return documents, manifest.total_tokens - repeats[1], manifest.total_tokens


Make = Callable[[Corpus], Iterable[object]]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page. `needs`: files that `task` writes; `attribute`: an attribute that the run
    must record; `is_of_graders`: the run must have a grader."""

    anchor: str
    title: str
    task: str
    needs: Callable[[Corpus], list[Path]]
    make: Make
    attribute: str = ""
    is_of_graders: bool = False

    def content(self, corpus: Corpus) -> Html:
        """The content of the section, or a line that says why it is missing."""
        if self.attribute and self.attribute not in corpus.run.config.attributes.use:
            return note(f"Not recorded: add {self.attribute!r} to [attributes] use.")
        if self.is_of_graders and corpus.run.config.grading.is_off:
            return note("Documents are not scored: the run has no [grading] grader.")
        missing = sum(not path.is_file() for path in self.needs(corpus))
        if missing:
            return note("Not made yet. Run ", element("code", f"nmoe run {self.task}"))
        if self.attribute and importlib.util.find_spec("pyarrow") is None:
            return note("A package is missing: pip install 'nmoe-data[attributes]'.")
        try:
            return joined(self.make(corpus))
        except UNREADABLE as error:
            return note(element("span", "Cannot be shown: ", kind="bad"), one_line(error))
