"""Downloads each file of a hub dataset when it is reached, and keeps it in the hub's cache.

A resumed or later run reads the cached files; for another commit only changed files are downloaded.
The cache is managed by `huggingface_hub` (`HF_HUB_CACHE`) and its commands.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from loader.files.regular import read_file
from nmoe_core.base.errors import SourceError
from nmoe_core.sources.links import Links, is_below
from nmoe_core.sources.spec import SourceSpec

_OF_HUB = ("hf://", "zip://")  # a zip without an archive cannot be opened


def refuse_foreign(files: Iterable[str], directory: Path | None, spec: SourceSpec) -> None:
    """Refuse files outside the dataset, since a dataset is not trusted. `files` are spelled as the
    library spells them; files that the source names in `hf_data_files` are allowed anywhere. Raises
    SourceError (E-SOURCE-OUTSIDE, E-SOURCE-LINK)."""
    links = Links(spec.follow_links)
    tops = set[str]()
    own = list[str]()
    if directory is not None:
        links.tops.add(os.path.realpath(directory))
        tops = links.tops | {os.path.abspath(directory)}
    for file in files:
        place = file.rpartition("::")[2]  # for a member of an archive, this is the archive
        if "://" not in place and is_below(os.path.abspath(place), tops):
            own.append(place)
        elif spec.hf_data_files is None and not (directory is None and place.startswith(_OF_HUB)):
            raise _foreign(file, spec)
    links.refuse(own)


def refuse_foreign_names(directory: Path, spec: SourceSpec) -> None:
    """Like `refuse_foreign`, for the files that the metadata of a directory names. Called before
    the library can contact another machine. Raises SourceError (E-SOURCE-OUTSIDE)."""
    import yaml
    from huggingface_hub import DatasetCard

    described: list[Any] = []
    try:
        if (card := directory / "README.md").is_file():
            described.append(DatasetCard.load(card).data.to_dict())
        if (own := directory / ".huggingface.yaml").is_file():
            described.append(yaml.safe_load(read_file(own).decode("utf-8")) or {})
        configs = [config for value in described for config in value.get("configs") or ()]
        named = [config.get(key) for config in configs for key in ("data_files", "data_dir")]
    except (yaml.YAMLError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"its README.md cannot be parsed: {error}") from error
    for text in _texts(named):
        is_above = os.path.normpath(text).split("/")[0] == ".."
        if is_above or os.path.isabs(text) or urlsplit(text).scheme or "::" in text:
            raise _foreign(text, spec)


def _texts(value: Any) -> Iterator[str]:
    """All texts in nested lists and dictionaries; shared objects are visited once."""
    waiting = [value]
    seen = set[int]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, (dict, list)) and id(one) not in seen:
            seen.add(id(one))
            waiting += one.values() if isinstance(one, dict) else one


def _foreign(file: str, spec: SourceSpec) -> SourceError:
    what = "the dataset refers to a file outside of it"
    do = "correct its README.md, or list the files in hf_data_files"
    return SourceError(what, where=spec.hf_dataset, found=file, do=do, code="E-SOURCE-OUTSIDE")


class HubFiles(NamedTuple):
    """The files of a split of a dataset at a commit."""

    dataset: str
    commit: str
    split: str

    def tables(self, builder: Any, rows: Any, row: int, batch_rows: int) -> Iterator[Any] | None:
        """Arrow tables of at most `batch_rows` rows, from `row` on; a table never spans two files.

        Returns None if the builder reads anything other than files of this commit, such as members
        of an archive or other URLs. `rows` is the builder's stream, which knows the column types.
        """
        prefix = f"hf://datasets/{self.dataset}@{self.commit}/"
        files = [str(file) for file in (builder.config.data_files or {}).get(self.split, ())]
        if not files or not all(file.startswith(prefix) for file in files):
            return None
        names = [file.removeprefix(prefix) for file in files]
        options = {"name": builder.config.name, "features": rows.features}
        return self._tables(names, options, row, batch_rows)

    def _tables(
        self, names: Sequence[str], options: dict[str, Any], row: int, batch_rows: int
    ) -> Iterator[Any]:
        import datasets
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        try:
            self._fetch("README.md")  # README.md may configure how files are read
        except LocalEntryNotFoundError:
            raise  # the hub does not answer
        except EntryNotFoundError:
            pass
        first = 0
        for name in names:
            rows = datasets.load_dataset(
                str(self._fetch(name)),
                split=self.split,
                data_files={self.split: [name]},
                streaming=True,
                **options,
            )
            tables = rows.with_format("arrow").iter(batch_size=batch_rows)
            for table in cast("Iterator[Any]", tables):  # the library annotates a different type
                if first + len(table) > row:
                    yield table.slice(max(0, row - first))
                first += len(table)

    def _fetch(self, name: str) -> Path:
        """Download a file to the cache, if needed; return the cache directory of its commit."""
        import huggingface_hub

        path = huggingface_hub.hf_hub_download(
            self.dataset, name, repo_type="dataset", revision=self.commit
        )
        return Path(path).parents[name.count("/")]
