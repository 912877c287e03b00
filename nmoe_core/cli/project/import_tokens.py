"""`nmoe import`: a project over files of tokens that another trainer's tools wrote."""

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from loader.files.addresses import is_url
from nmoe_core.base.atomic import write_bytes
from nmoe_core.base.errors import ConfigError, NmoeError, SourceError
from nmoe_core.base.strict import validate, with_tuples
from nmoe_core.cli.flags import PROJECT_FILE
from nmoe_core.cli.output import add_verb, print_rows
from nmoe_core.cli.project.token_sample import TokenSample, require_same, sample_tokens
from nmoe_core.config.run import Run
from nmoe_core.prep.encoding.texts import Encoder
from nmoe_core.prep.settings import PrepSettings
from nmoe_core.sources.discover import OUTPUT, as_id, relative
from nmoe_core.sources.formats import split_of
from nmoe_core.sources.forms.tokens.source import FORMATS, TokensSource
from nmoe_core.sources.open import open_reader
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.spec import SourceSpec, TokenFormat
from nmoe_core.tasks.commands import make_split, splits_of
from nmoe_core.text.tokenizer import Tokenizer, load_tokenizer

_TOKENS_PER_SHARD = 50_000_000
_SEQ_LENS = (4096, 2048, 1024, 512, 256, 128, 64)
_TEXT = """\
# A run over files of tokens. In this directory:
#   python -m loader peek {file} --rows 1   shows what a trainer reads from the shards as they are
#   nmoe prep-mixture         takes files that were added
#   nmoe run                  makes attributes, curated shards and a loader plan; nmoe report, ui
# All keys: the page Configuration of the documentation of nmoe-data, which `make docs` builds.
root = "{root}"
flow_mode = "own"
tokenizer = {tokenizer}
seq_len = {seq_len}
batch_size = 4
seed = 42
on_exhaust = "wrap"      # a source with too few kept tokens is read again

[prep]
num_shards = {num_shards}
max_tokens = "all"
min_doc_tokens = 1       # documents without text are left out, all others are kept
dtype = "auto"
eos_token = {eos}
bos_token = {bos}
workers = {workers}

[attributes]
use = ["signals", "language", "duplicates"]
# No document is labelled or scored: the rule decides alone. See docs/howto/rules_only.md.
[grading]
grader = "none"
[curation]
where = "is_survivor"    # not a near duplicate
[backbone]
kind = "tiny"

[mixtures.own]
[[mixtures.own.sources]]
{source}
[flow.own]
mode = "own"
stages = ["pretrain"]
mixture = {{ pretrain = "own" }}
"""


def register(verbs: Any) -> None:
    text = "make a project and shards from files of tokens of another trainer"
    verb = add_verb(verbs, "import", import_tokens, text, _show)
    verb.add_argument("format", choices=get_args(TokenFormat), help="tool that wrote the files")
    text = "files, directories, or prefixes such as those of --data-path of Megatron"
    verb.add_argument("paths", nargs="+", metavar="PATH", help=text)
    text = "encoding of tiktoken, tokenizer file, its directory, or hub repository"
    verb.add_argument("--tokenizer", required=True, metavar="NAME", help=text)
    verb.add_argument("--name", help="source name (default: from the first path)")
    text = "files of the validation split (default: files whose names say so)"
    verb.add_argument("--valid", nargs="+", default=[], metavar="PATH", help=text)
    text = "token that ends documents, by name or id (default: the tokenizer's EOS)"
    verb.add_argument("--eos-token", default="auto", metavar="TOKEN", help=text)
    text = "type of tokens in files that do not name it (default: by the vocabulary)"
    verb.add_argument("--integers", choices=("uint16", "uint32", "int32", "int64"), help=text)
    text = "where documents end (default: at the bounds in the files; at EOS in packed rows)"
    verb.add_argument("--bounds", choices=("index", "eos"), help=text)
    text = "column of tokens (mds, hf; default: tokens or input_ids)"
    verb.add_argument("--tokens-field", metavar="NAME", help=text)
    verb.add_argument("--id-field", metavar="NAME", help="column of document ids (mds, hf)")
    text = "import even if the tokens do not seem to be of this tokenizer"
    verb.add_argument("--unchecked", action="store_true", help=text)
    verb.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")


def import_tokens(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check the files, write the project's file, and make its shards. Raises NmoeError before
    anything is written if the files are not as the format and the tokenizer say."""
    path = Path(PROJECT_FILE)
    if path.exists():
        do = "run `nmoe prep-mixture` to take added files, or work in another directory"
        raise ConfigError("this file exists already", where=path.absolute(), do=do)
    named = {"tokenizer": arguments.tokenizer, "eos_token": arguments.eos_token}
    chosen = PrepSettings(**named, engine="reference")  # a sample is too short to prove another
    tokenizer = load_tokenizer(chosen.chosen)
    encoder = Encoder(tokenizer, chosen, np.dtype(np.uint32), None)
    table = _table(arguments, tokenizer)
    source, table = _opened(table, tokenizer)
    sample = sample_tokens(source, encoder)
    if sample.are_packed and arguments.bounds is None:
        source, table = _opened(table | {"bounds": "eos"}, tokenizer)
        sample = sample_tokens(source, encoder)
    if not arguments.unchecked:
        require_same(sample, tokenizer)
    write_bytes(path, _text(arguments, table, sample).encode())
    try:
        run = Run(path)
        splits = [make_split(run, job).facts for job in splits_of(run, ["train", "valid"])]
    except NmoeError:
        path.unlink(missing_ok=True)  # so that the corrected command can run here
        raise
    facts = {"equal_share": round(sample.equal_share, 4), "text": sample.text}
    facts |= {"starts_with_bos": sample.starts_with_bos, "bounds": table.get("bounds", "index")}
    return {"path": str(path.absolute()), **facts, "splits": splits}


def _table(arguments: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    """The keys of the source, as far as the command line says."""
    train, held_out = _patterns(arguments.format, arguments.paths)
    valid = _patterns(arguments.format, arguments.valid)[0] if arguments.valid else held_out
    stem = Path(arguments.paths[0].rstrip("/")).name.partition(".")[0]
    table = {
        "id": arguments.name or as_id(stem),
        "kind": "tokens",
        "format": arguments.format,
        "paths": train,
        "valid_paths": valid,
        "eos_token_id": tokenizer.eos_token_id,
        "integers": arguments.integers,
        "bounds": arguments.bounds,
        "tokens_field": arguments.tokens_field,
        "id_field": arguments.id_field,
    }
    return {key: value for key, value in table.items() if value not in (None, [])}


def _patterns(form: TokenFormat, paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Patterns of the files of training, and of those whose names mark a validation split. Files of
    a test split are left out. A directory without such names has one pattern, which finds files
    that are added later. Raises SourceError if a directory has no such file (E-SOURCE-NOTFOUND)."""
    suffixes = FORMATS[form].suffixes
    train: list[str] = []
    valid: list[str] = []
    for path in paths:
        plain = path if is_url(path) else relative(Path(path), Path.cwd())
        if not Path(path).is_dir():
            for one in FORMATS[form].needed:
                plain = plain.removesuffix(one)
            train.append(plain if plain.endswith(suffixes) else plain + suffixes[0])
            continue
        directory = f"{plain}/**/" + ("" if form == "mds" else "*")
        names = {directory + one: _names(directory + one) for one in suffixes}
        names = {pattern: found for pattern, found in names.items() if found}
        if not names:
            find_files([directory + suffixes[0]], Path.cwd())  # raises
        splits = {n: split_of(n[len(plain) :]) for of_one in names.values() for n in of_one}
        if {"valid", "test"} & set(splits.values()):
            train += [name for name, split in splits.items() if split not in ("valid", "test")]
            valid += [name for name, split in splits.items() if split == "valid"]
        else:
            train += names
    return train, valid


def _names(pattern: str) -> list[str]:
    """The files that match a pattern; empty if there are none."""
    try:
        return [relative(Path(one.path), Path.cwd()) for one in find_files([pattern], Path.cwd())]
    except SourceError as error:
        if error.code != "E-SOURCE-NOTFOUND":
            raise
        return []


def _opened(table: dict[str, Any], tokenizer: Tokenizer) -> tuple[TokensSource, dict[str, Any]]:
    """The source of the training files, and its keys. If the files do not name the type of their
    tokens, it is that of the vocabulary."""
    try:
        return _checked(table), table
    except SourceError as error:
        if error.code != "E-SOURCE-INTEGERS" or "integers" in table:
            raise
    table = table | {"integers": "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"}
    return _checked(table), table


def _checked(table: dict[str, Any]) -> TokensSource:
    spec = validate(SourceSpec, with_tuples(table), "nmoe import")
    if spec.valid_paths:
        open_reader(spec, Path.cwd(), "valid").check()
    source = open_reader(spec, Path.cwd(), "train")
    assert isinstance(source, TokensSource)
    source.check()
    return source


def _text(arguments: argparse.Namespace, table: dict[str, Any], sample: TokenSample) -> str:
    """The text of the project's file."""
    billions = max(sample.num_tokens, 1000) / 1e9
    keys = {"id": table["id"], "tokens_b": f"{billions:.12f}".rstrip("0")}
    lines = [f"tokens_b = {keys['tokens_b']}"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    eos = arguments.eos_token
    return _TEXT.format(
        file=PROJECT_FILE,
        root=OUTPUT,
        tokenizer=json.dumps(_tokenizer_name(arguments.tokenizer)),
        seq_len=next((n for n in _SEQ_LENS if 16 * n <= sample.num_tokens), _SEQ_LENS[-1]),
        num_shards=min(9999, math.ceil(max(sample.num_tokens, 1) / _TOKENS_PER_SHARD) + 1),
        eos=json.dumps(int(eos) if eos.isdecimal() else eos),
        bos=json.dumps("auto" if sample.starts_with_bos else "none"),
        workers=arguments.workers,
        source="\n".join(lines),
    )


def _tokenizer_name(name: str) -> str:
    """The tokenizer as the project's file names it: a path without the directories above."""
    return relative(Path(name), Path.cwd()) if Path(name).exists() else name


def _show(facts: dict[str, Any]) -> None:
    share = f"{100 * facts['equal_share']:.1f} %"
    print(f"{share} of the sampled documents encode to the same tokens again; one of them begins:")
    print(f"  {facts['text']!r}")
    if facts["bounds"] == "eos":
        print("documents end at EOS, also inside rows")
    if facts["starts_with_bos"]:
        print("documents begin with BOS (prep.bos_token)")
    for split in facts["splits"]:
        for what, count in split.get("changed_tokens", {}).items():
            print(f"{split['source']}/{split['split']}: {count:,} records: {what}")
    names = ("source", "split", "documents", "tokens", "left_out", "shards_made", "seconds")
    print_rows([{name: split.get(name) for name in names} for split in facts["splits"]])
    print(f"wrote {facts['path']}. What a trainer reads now: python -m loader peek {PROJECT_FILE}")
    print("To curate first: nmoe run; nmoe report")
