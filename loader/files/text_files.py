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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loader.errors import ConfigError, NmoeError, PlanError
from loader.files.addresses import is_url
from loader.files.store import one_line

_NAME_COMMIT = (
    "set hf_revision (in configs: revision) to a commit, which needs no look-up, or load the plan"
    " that was saved"
)
MAX_FILES = 100_000
_MAX_DIGITS = 18
_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")
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
    with reading(url, "file cannot be read"):
        if is_url(path):
            files, inside = import_extra("fsspec", "remote", url).core.url_to_fs(path)
            return [url, files.ukey(inside)]
        status = os.stat(path)
    return [url, status.st_size, status.st_mtime_ns]


def _commit(source: TextSource) -> str:
    """Commit of a dataset on the hub; no look-up where `revision` is one."""
    if _COMMIT.fullmatch(source.revision):
        return source.revision
    hub = import_extra("huggingface_hub", "hf", source.spec)
    what = "the hub does not say which commit of the dataset is meant"
    with reading(source.spec, what, _NAME_COMMIT):
        found = hub.HfApi().dataset_info(source.repo, revision=source.revision or None).sha
    return str(found)


@contextmanager
def reading(where: str, what: str, do: str | None = None) -> Iterator[None]:
    """Turns whatever a client or a file system raises into one line (E-PLAN-SOURCE)."""
    try:
        yield
    except NmoeError:
        raise
    except Exception as error:
        found = one_line(error)
        raise PlanError(what, where=where, found=found, do=do, code="E-PLAN-SOURCE") from error


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
    """`a{1..3}b` and `a{x,y}b` written out; braces may repeat. Leading zeros set the width.

    Raises:
        ConfigError: A range runs backwards, or there are more than `MAX_FILES` names.
    """
    names, at = [""], 0
    for match in _BRACES.finditer(pattern):
        first, last, listed = match.groups()
        middle = listed.split(",") if listed is not None else _numbers(first, last, pattern)
        if len(names) * len(middle) > MAX_FILES:
            raise _too_many(pattern)
        head = pattern[at : match.start()]
        names = [name + head + part for name in names for part in middle]
        at = match.end()
    return [name + pattern[at:] for name in names]


def _numbers(first: str, last: str, pattern: str) -> list[str]:
    if max(len(first), len(last)) > _MAX_DIGITS or int(last) - int(first) >= MAX_FILES:
        raise _too_many(pattern)
    if int(last) < int(first):
        raise ConfigError(
            "a range runs backwards", where=pattern[:200], found=f"{{{first}..{last}}}"
        )
    width = len(first) if first.startswith("0") else 0
    return [str(i).zfill(width) for i in range(int(first), int(last) + 1)]


def _too_many(pattern: str) -> ConfigError:
    return ConfigError(
        "a pattern names too many files",
        where=pattern[:200],
        expected=f"at most {MAX_FILES} files",
        do="list the files, or use * for those that are there",
    )


def import_extra(module: str, extra: str, where: str) -> Any:
    """A package of an extra. Raises ConfigError: it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"{module} is not installed", where=where, do=f"pip install 'nmoe-loader[{extra}]'"
        ) from None
