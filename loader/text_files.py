"""Where text is, and which text it is: sources to tokenise, their files and their content's stamp.

A stamp is what a cache of tokens is good for: each local file's size and time of change, what a
remote store says of each object, or the commit of a dataset on the hub. No text is read for it. A
file that was only touched counts as changed.
"""

from __future__ import annotations

import glob
import importlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loader.addresses import is_url
from loader.errors import ConfigError, PlanError

_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class TextSource:
    """Where text is. Either `repo`, a dataset's name on the hub or its local directory, with
    `config`, `split` and, on the hub, `revision`; or `urls` of files, with `*` and `{1..9}` or
    `{a,b}`."""

    repo: str = ""
    config: str = ""
    split: str = "train"
    text_key: str = "text"
    revision: str = ""
    urls: tuple[str, ...] = ()
    valid_urls: tuple[str, ...] = ()

    @property
    def spec(self) -> str:
        """The source in one line, as the token-balance document writes it."""
        head = f"hf:{self.repo}" if self.repo else f"txt:{','.join(self.urls)}"
        parts = [head]
        if self.config:
            parts.append(self.config)
        if self.repo and (self.config or self.split != "train" or self.text_key != "text"):
            parts.append(self.split)
        return ":".join(parts + ([self.text_key] if self.text_key != "text" else []))


def content_stamp(source: TextSource) -> list[list[Any]]:
    """What tells one content of a source from another; JSON values.

    Raises:
        PlanError: A file is missing, or the hub does not say which commit is meant (E-PLAN-SOURCE).
        ConfigError: A local directory is given a revision.
    """
    if not source.repo:
        return [_file_stamp(url) for url in expand((*source.urls, *source.valid_urls))]
    directory = Path(source.repo)
    if not directory.is_dir():
        return [[source.repo, _commit(source)]]
    if source.revision:
        raise ConfigError(
            "a directory has no revision", where=source.spec, found=repr(source.revision)
        )
    return [_file_stamp(str(path)) for path in sorted(directory.rglob("*")) if path.is_file()]


def _file_stamp(url: str) -> list[Any]:
    path = url.removeprefix("file://")
    try:
        if is_url(path):
            files, inside = import_extra("fsspec", "remote", url).core.url_to_fs(path)
            return [url, files.ukey(inside)]
        status = os.stat(path)
    except OSError as error:
        raise PlanError(
            "file cannot be read", where=url, found=str(error), code="E-PLAN-SOURCE"
        ) from None
    return [url, status.st_size, status.st_mtime_ns]


def _commit(source: TextSource) -> str:
    """Commit of a dataset on the hub; no look-up where `revision` is one."""
    if _COMMIT.fullmatch(source.revision):
        return source.revision
    hub = import_extra("huggingface_hub", "hf", source.spec)
    try:
        found = hub.HfApi().dataset_info(source.repo, revision=source.revision or None).sha
    except Exception as error:  # whatever the hub's client raises, there is no commit
        raise PlanError(
            "the hub does not say which commit of the dataset is meant",
            where=source.spec,
            found=" ".join(str(error).split())[:200],
            do="set hf_revision (in configs: revision) to a commit, which needs no look-up, or"
            " load the plan that was saved",
            code="E-PLAN-SOURCE",
        ) from error
    return str(found)


def expand(urls: tuple[str, ...]) -> Iterator[str]:
    """URLs of single files; patterns of local ones are looked up. Raises PlanError."""
    for url in urls:
        for one in expand_braces(url):
            if is_url(one.removeprefix("file://")) or not glob.has_magic(one):
                yield one
                continue
            found = sorted(glob.glob(one.removeprefix("file://"), recursive=True))
            if not found:
                raise PlanError("no file matches", where=one, code="E-PLAN-SOURCE")
            yield from found


def expand_braces(pattern: str) -> list[str]:
    """`a{1..3}b` and `a{x,y}b` written out; braces may repeat. Leading zeros set the width."""
    match = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", pattern)
    if match is None:
        return [pattern]
    first, last, listed = match.groups()
    if listed is not None:
        middle = listed.split(",")
    else:
        width = len(first) if first.startswith("0") else 0
        middle = [str(i).zfill(width) for i in range(int(first), int(last) + 1)]
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [head + part + rest for part in middle for rest in expand_braces(tail)]


def import_extra(module: str, extra: str, where: str) -> Any:
    """A package of an extra. Raises ConfigError: it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"{module} is not installed", where=where, do=f"pip install 'nmoe-loader[{extra}]'"
        ) from None
