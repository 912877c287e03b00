"""Text sources of a run: a data set on a hub, or files. A plug-in tokenises them into shards.

This package only reads tokens. A plug-in is an entry point of the group `nmoe_loader.text_sources`,
a function with the arguments of `tokenised`; the package `nmoe-data` provides one.
"""

from dataclasses import dataclass
from pathlib import Path

from loader.errors import ConfigError
from loader.plan.settings import RunSettings

GROUP = "nmoe_loader.text_sources"


@dataclass(frozen=True, slots=True)
class TextSource:
    """Location of a text: either `repo`, the name of a data set on the hub or its local directory,
    with `config`, `split` and, on the hub, `revision`; or `urls` of files, which may contain `*`,
    `{1..9}` or `{a,b}`."""

    repo: str = ""
    config: str = ""
    split: str = "train"
    text_key: str = "text"
    revision: str = ""
    urls: tuple[str, ...] = ()
    valid_urls: tuple[str, ...] = ()

    @property
    def spec(self) -> str:
        """The source as one string, in the format of token-balance."""
        parts = [f"hf:{self.repo}" if self.repo else f"txt:{','.join(self.urls)}"]
        if self.config:
            parts.append(self.config)
        if self.repo and (self.config or self.split != "train" or self.text_key != "text"):
            parts.append(self.split)
        if self.text_key != "text":
            parts.append(self.text_key)
        return ":".join(parts)


def tokenised(source: TextSource, name: str, run: RunSettings) -> Path:
    """The directory of a source's shards, with `train/` and, if there are files for validation,
    `valid/`.

    The plug-in writes it to `run.cache_dir`, with the run's tokenizer, if it does not exist yet.
    Raises ConfigError if `cache_dir` or the tokenizer is missing, or no plug-in is installed, and
    NmoeError if the plug-in cannot read or tokenise the text.
    """
    where = f"source {name!r}"
    if run.cache_dir is None:
        raise ConfigError(
            "cache_dir is missing",
            where=where,
            do="set cache_dir, the directory to which the tokens of the text are written",
        )
    if run.tokenizer_path is None and run.tokenizer is None:
        raise ConfigError("tokenizer is missing", where=where, do="set tokenizer or tokenizer_path")
    from importlib.metadata import entry_points  # imported late, since only text sources need it

    for plug_in in entry_points(group=GROUP):
        return plug_in.load()(source, name, run)
    raise ConfigError(
        "no plug-in for text sources is installed",
        where=where,
        found=source.spec,
        do="pip install 'nmoe-data[hf]', or set path to a directory of shards",
    )
