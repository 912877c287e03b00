"""Files of a dataset on the hub, each downloaded when it is reached and kept in the hub's cache.

A run that goes on, and a later one, read what is kept; of another commit only files that changed
are downloaded. The cache is that of `huggingface_hub` (`HF_HUB_CACHE`), whose commands empty it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast


class HubFiles(NamedTuple):
    """Files of a split of a dataset at a commit."""

    dataset: str
    commit: str
    split: str

    def tables(self, builder: Any, rows: Any, row: int, batch_rows: int) -> Iterator[Any] | None:
        """Arrow tables of at most so many rows, from a row on; none goes over the end of a file.

        None where the builder reads something else than files of this commit, such as a member of
        an archive or an address elsewhere. `rows` is its stream, which knows the types of columns.
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
            self._fetch("README.md")  # which may say how the files are read
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
            for table in cast("Iterator[Any]", tables):  # the library declares another format's
                if first + len(table) > row:
                    yield table.slice(max(0, row - first))
                first += len(table)

    def _fetch(self, name: str) -> Path:
        """Have a file in the cache; return the directory of its commit there."""
        import huggingface_hub

        path = huggingface_hub.hf_hub_download(
            self.dataset, name, repo_type="dataset", revision=self.commit
        )
        return Path(path).parents[name.count("/")]
