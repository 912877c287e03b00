"""Tasks of attributes: one file per attribute and shard."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nmoe_core.attributes import CODES
from nmoe_core.base.atomic import replacing
from nmoe_core.base.errors import ConfigError
from nmoe_core.base.fingerprint import Fingerprints, sha256_json
from nmoe_core.base.progress import Meter
from nmoe_core.base.result import Result
from nmoe_core.base.settings import expert_fingerprints
from nmoe_core.config.attributes import OF_BACKBONE
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources
from nmoe_core.sources.paths import find_files
from nmoe_core.tasks.backbone import backbone_kind, ids_for_model, load_backbone, make_backbone
from nmoe_core.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import pyarrow as pa

    from nmoe_core.attributes.attribute import Attribute
    from nmoe_core.attributes.own.files import UserFiles
    from nmoe_core.attributes.shared import Corpus
    from nmoe_core.text.models import ModelIds

_PART_BYTES = 2**18
# Module and function of each attribute that is computed from a text.
_OF_TEXTS = {
    "signals": ("signals", "signals"),
    "language": ("language", "language"),
    "pii": ("pii", "pii"),
    "contamination": ("contamination", "contamination"),
    "signatures": ("minhash", "signatures"),
}


def attribute_names(run: Run) -> list[str]:
    """The attributes that the run records, in the order in which they are made."""
    table = run.config.attributes
    used = [name for name in table.use if name != "duplicates"]
    both = ["signatures", "duplicates"] if "duplicates" in table.use else []
    return [*dict.fromkeys(used), *both, *table.own]


def shard_attribute_names(run: Run) -> list[str]:
    """The attributes that are made per shard: all except duplicates."""
    return [name for name in attribute_names(run) if name != "duplicates"]


def chosen_attributes(run: Run, only: Sequence[str] | None = None) -> list[str]:
    """The named attributes (by default all), in the order in which the run makes them. If
    `duplicates` is named, `signatures` is included. Raises ConfigError if the run records no
    attributes, or does not record a named attribute."""
    known = attribute_names(run)
    unknown = sorted(set(only or ()) - set(known))
    if unknown or not known:
        raise ConfigError(
            "unknown attribute" if unknown else "the run records no attributes",
            where=run.path,
            found=", ".join(unknown) or None,
            expected=f"of {', '.join(known)}" if known else None,
            do="add the attribute to [attributes] use, or name its files in attributes.files, or "
            "its function in [attributes.NAME]",
        )
    wanted = set(known if only is None else only)
    if "duplicates" in wanted:
        wanted.add("signatures")
    return [name for name in known if name in wanted]


def make_attributes(name: str, run: Run, source: str, buckets: Iterable[int]) -> dict[int, Result]:
    """Make the files of an attribute for shards of a source; current files are kept. Raises as
    `make_attribute`, `join_attribute` and `open_attribute`."""
    from nmoe_core.attributes.attribute import make_attribute
    from nmoe_core.attributes.own.files import join_attribute

    shards = {bucket: run.tree.shard(source, bucket) for bucket in sorted(buckets)}
    if name in run.config.attributes.files:
        files = user_files(run, name)
        return {bucket: join_attribute(shard, files) for bucket, shard in shards.items()}
    attribute = open_attribute(run, name)
    return {b: make_attribute(shard, attribute, run.tokenizer) for b, shard in shards.items()}


def user_files(run: Run, name: str) -> UserFiles:
    """The user's files of an attribute."""
    from nmoe_core.attributes.own.files import UserFiles

    pattern = run.config.attributes.files[name]
    return UserFiles(name, [Path(file.path) for file in find_files([pattern], run.base)])


def open_attribute(run: Run, name: str) -> Attribute:
    """Open an attribute that is computed from texts. Raises ConfigError if its package is not
    installed or contamination has no evaluation set, SourceError if a set cannot be read, and the
    errors of `own_attribute` and of `open_state_attribute`."""
    if (table := run.config.attributes.functions.get(name)) is not None:
        return _import("own.functions").own_attribute(name, table.at(run.base))
    from nmoe_core.attributes.attribute import Attribute

    if name in OF_BACKBONE:
        return open_state_attribute(run, name)
    module_name, function = _OF_TEXTS[name]
    module = _import(module_name)
    made_with: Fingerprints = {"code": CODES[name]}
    compute: Any = getattr(module, function)
    facts: dict[str, int] = {}
    if name == "contamination":
        made_with |= evaluations_made_with(run)
        sets = _evaluations(run, module)
        compute = partial(compute, evaluations=sets)
        facts = sets.facts
    return Attribute(name, module.SCHEMA, made_with, compute, facts)


def evaluations_made_with(run: Run) -> Fingerprints:
    """What decides which strings are searched for. Raises ConfigError if the run has no evaluation
    set, and SourceError if a file is missing."""
    from nmoe_core.sources.forms.strings import set_revision

    table = run.config.contamination
    if not table.evaluations:
        raise ConfigError(
            "contamination has no evaluation set",
            where=run.path,
            do="name files of texts in [contamination] evaluations",
            code="E-CONFIG-EVALUATIONS",
        )
    revisions = {key: set_revision(one, run.base) for key, one in table.evaluations.items()}
    found = {"evaluations": sha256_json(revisions)}
    is_default = table.min_words == type(table)().min_words  # rows made before the key existed
    return found if is_default else found | {"min_words": str(table.min_words)}


def _evaluations(run: Run, module: Any) -> Any:
    from nmoe_core.sources.forms.strings import set_strings

    table = run.config.contamination
    texts = {key: [*set_strings(one, run.base)] for key, one in table.evaluations.items()}
    return module.Evaluations.of(texts, table.min_words)


def open_state_attribute(run: Run, name: str, tokenizer: Tokenizer | None = None) -> Attribute:
    """Open `embedding` or `perplexity`; the backbone is loaded when the first row is computed. Its
    documents are in the ids of the run's shards or, if `tokenizer` is given, in this tokenizer's
    ids, which the backbone reads.

    Raises:
        ConfigError: The backbone has no such block, or pyarrow is not installed (E-CONFIG-EXTRA).
        CheckpointError, TokenizerError: The backbone or its tokenizer is missing or unreadable.
    """
    columns = _import("columns")
    from nmoe_core.attributes.attribute import Attribute
    from nmoe_core.engine.weights.weight_files import read_config

    ids = ids_for_model(run) if tokenizer is None else None
    schema = columns.SCHEMAS[name]
    options: dict[str, Any] = {}
    if name == "embedding":
        layers = _layers(run)
        pooling = run.config.attributes.embedding.pooling
        options = {"layers": layers, "pooling": pooling}
        width = read_config(run.tree.checkpoint).hidden_size
        schema = columns.embedding_schema(layers, pooling, width)

    def compute(tokens: list[Any], add: Callable[[int], None]) -> pa.Table:
        from nmoe_core.quality import states

        most = getattr(run.config.attributes, name).max_tokens
        own = tokenizer or (load_tokenizer(run.tokenizer) if ids is None else ids.model)
        reader = states.Reader(load_backbone(run), own, ids, most)
        return getattr(states, name)(tokens, add, reader=reader, **options)

    return Attribute(name, schema, _made_with(run, name, ids), compute, reads_tokens=True)


def _made_with(run: Run, name: str, ids: ModelIds | None) -> Fingerprints:
    from nmoe_core.engine.weights.weight_files import checkpoint_digest

    table = getattr(run.config.attributes, name).model_dump()
    if name == "embedding":
        table["layers"] = " ".join(_layers(run))
    return {
        "code": CODES[name],
        "backbone": checkpoint_digest(run.tree.checkpoint),
        "dtype": run.config.backbone.dtype,
        **expert_fingerprints(run.config.backbone.moe_backend),
        **{key: str(value) for key, value in table.items()},
        **({} if ids is None else ids.fingerprints),
    }


def _layers(run: Run) -> list[str]:
    """The blocks whose states are kept. Raises ConfigError if the backbone has fewer blocks."""
    from nmoe_core.engine.weights.weight_files import read_config

    depth = read_config(run.tree.checkpoint).num_hidden_layers
    layers = list(run.config.attributes.embedding.layers) or [str(max(1, depth // 2))]
    for layer in layers:
        if (layer != "final" and int(layer) > depth) or layers.count(layer) > 1:
            raise ConfigError(
                "attributes.embedding.layers does not fit the backbone",
                where=run.path,
                found=", ".join(layers),
                expected=f"different blocks of 1 to {depth}, or final",
            )
    return layers


def describe_file(
    run: Run, name: str, path: Path, out: Path, fields: tuple[str, str | None]
) -> dict[str, Any]:
    """Write the attribute of the texts of a JSON lines file to the Parquet file `out`, unless it is
    up to date, and return its facts. `fields` are the keys of text and id, as in `JsonlTexts`.
    Documents are tokenised by the backbone's tokenizer.

    Raises:
        SourceError: A line is not a document (E-SOURCE-RECORD), or the file is missing.
        FormatError: A document id occurs twice (E-DOCID).
        TokenizerError: The backbone has no tokenizer (E-TOKENIZER-NAME).
        LockedError: Another process is writing this output (E-LOCKED).
    """
    from nmoe_core.attributes.attribute import Parts, made, replace_rows
    from nmoe_core.curate.topics.embed import runs_within
    from nmoe_core.labels.documents import JsonlTexts
    from nmoe_core.shards.attribute_file import Documents, is_attribute_current

    started = time.perf_counter()
    if run.config.backbone.kind == "tiny":
        make_backbone(run)
    texts = JsonlTexts(path, *fields)
    tokenizer = _model_tokenizer(run)
    attribute = open_state_attribute(run, name, tokenizer)
    most = getattr(run.config.attributes, name).max_tokens
    made_from = {"texts": texts.sha256, "tokenizer": tokenizer.fingerprint}
    made_from |= {**texts.fingerprints, **attribute.made_with}
    doc_ids = [doc_id for doc_id, _ in texts.rows]
    computed = 0
    with replacing(out):
        if not is_attribute_current(out, made_from):
            payloads = (texts.text(doc_id).encode() for doc_id in doc_ids)
            measured = [(hashlib.sha256(one).hexdigest(), len(one)) for one in payloads]
            digests = [digest for digest, _ in measured]
            sizes = np.array([size for _, size in measured], np.int64)
            parts = Parts(out, made_from)
            meter = Meter(f"{name} {path.name}", len(doc_ids))

            def rows_of(some: slice) -> pa.Table:
                tokens = [tokenizer.encode_long(texts.text(one), most) for one in doc_ids[some]]
                return attribute.compute(tokens, meter.add)

            batches = (
                batch
                for some in runs_within(sizes, _PART_BYTES, len(doc_ids))
                for batch in parts.rows(digests[some], partial(rows_of, some)).to_batches()
            )
            documents = Documents(doc_ids, digests)
            replace_rows(out, name, made_from, documents, attribute.schema, batches)
            parts.remove()
            computed = len(doc_ids)
    facts = made(out, computed=computed).facts
    row = {"attribute": name, "source": str(path), "documents": facts["documents"]}
    seconds = round(time.perf_counter() - started, 1)
    return row | {"computed": computed, "MB": round(facts["bytes"] / 1e6, 1), "seconds": seconds}


def _model_tokenizer(run: Run) -> Tokenizer:
    """The backbone's tokenizer; with random weights, the run's."""
    from nmoe_core.curate.jsonl.record_embeddings import open_tokenizer
    from nmoe_core.curate.topics.embed import table_shape
    from nmoe_core.text.models import model_tokenizer

    path = run.tree.checkpoint
    num_rows = table_shape(path)[0]
    if backbone_kind(run) == "tiny" and model_tokenizer(path, num_rows) is None:
        return load_tokenizer(run.tokenizer)
    return open_tokenizer(path, num_rows)


def attribute_schema(run: Run, name: str) -> Any:
    """Columns of an attribute as an Arrow schema, also before the attribute is made; for an
    attribute from the user's files, the columns of the files. Raises as `open_attribute`, and
    FormatError if a file cannot be read."""
    if (table := run.config.attributes.functions.get(name)) is not None:
        return _import("own.functions").own_schema(table)
    if name in run.config.attributes.files:
        return user_files(run, name).schema
    for package in ("numba", "pyarrow"):
        if importlib.util.find_spec(package) is None:
            raise _missing(package, name)
    columns = _import("columns")
    is_counted = name == "duplicates" and run.config.duplicates.count_copies
    return columns.SCHEMAS[name].append(columns.NUM_COPIES) if is_counted else columns.SCHEMAS[name]


def make_duplicates(
    run: Run, sources: Sequence[str] | None = None, *, with_copies: bool = False
) -> Result:
    """Find the copies among all documents of the run by their signatures, and repeated passages by
    their tokens if that is asked for; writes only the files of shards with changed rows. Raises
    FormatError if a shard has no current signatures, and as `repeated_passages`."""
    from nmoe_core.attributes.shared import write_changed

    module = _import("copies.search")
    table = run.config.duplicates
    names = [source.name for source in run_sources(run)] if sources is None else list(sources)
    corpus, made_with = duplicates_inputs(run, names)
    tokenizer = partial(load_tokenizer, run.tokenizer)

    def resolve(before: Any) -> list[Any]:
        chosen = table, run.config.seen.part_tokens
        return module.search_copies(corpus, before, *chosen, tokenizer, run.tree.attributes)

    settings = table.model_dump(mode="json")
    result = write_changed(run.tree, "duplicates", corpus, made_with, resolve, settings)
    if not with_copies:
        return result
    return replace(result, facts=result.facts | {"copies": copies_by_source(run, names)})


def duplicates_inputs(run: Run, sources: Sequence[str]) -> tuple[Corpus, Fingerprints]:
    """The signatures of all shards of sources, and the fingerprints of the search for copies.
    Raises FormatError if a shard has no current signatures."""
    from nmoe_core.attributes.shared import Corpus

    shards = [s for name in sources for s in run.tree.shards(name, run.config.prep.num_shards)]
    settings = sha256_json(run.config.duplicates.identity)
    made_with = {"code": CODES["duplicates"], "settings": settings}
    return Corpus.open(shards, "signatures"), made_with


def duplicates_digests(run: Run, source: str) -> dict[str, str]:
    """The digest of the rows of `duplicates` of each shard, by `0000`. Raises FormatError if a file
    is missing or damaged."""
    from nmoe_core.shards.attribute_file import read_footer

    shards = run.tree.shards(source, run.config.prep.num_shards)
    return {f"{one.bucket:04d}": read_footer(one.attribute("duplicates")).digest for one in shards}


def copies_by_source(run: Run, sources: Sequence[str]) -> list[dict[str, Any]]:
    """Number of documents of each source, and of `exact` and `near` copies among them."""
    from nmoe_core.shards.attribute_file import read_attribute

    rows = []
    for source in sources:
        counts = {"documents": 0, "exact": 0, "near": 0}
        for shard in run.tree.shards(source, run.config.prep.num_shards):
            found = read_attribute(shard.attribute("duplicates"), ["exact_of", "near_of"])
            counts["documents"] += found.num_rows
            for kind in ("exact", "near"):
                counts[kind] += found.num_rows - found.column(f"{kind}_of").null_count
        rows.append({"source": source, **counts})
    return rows


def copies_picture(copies: Sequence[Mapping[str, Any]]) -> str:
    """Markdown with a bar chart of `copies_by_source`."""
    from nmoe_core.report.plots import copies_plot, png_markdown

    return png_markdown(copies_plot(copies), "copies by source")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(f"nmoe_core.attributes.{name}")
    except ImportError as error:
        raise _missing(error.name, name) from error


def _missing(package: str | None, name: str) -> ConfigError:
    return ConfigError(
        f"attributes need the package `{package}`",
        where=f"attribute {name}",
        do="pip install 'nmoe-data[attributes]'",
        code="E-CONFIG-EXTRA",
    )
