"""The data card of a corpus (README.md of a hub dataset) and its Croissant description."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nmoe_core.base.errors import one_line
from nmoe_core.base.fingerprint import sha256_file
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources
from nmoe_core.quality.heads.metrics import in_families
from nmoe_core.tasks.report.corpus import UNREADABLE, Corpus, kept_of, readable_manifest
from nmoe_core.tasks.report.origins import facts, origin
from nmoe_core.tasks.report.sections import language_shares, with_interval
from nmoe_core.tasks.report.summary import head_headers
from nmoe_core.tasks.selection.outcome import left_out, rule_of

MADE_BY = "# Written by nmoe report: it is replaced by the next one."
_LEAST_SHARE = 0.01  # the card lists languages with at least this share
_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"))
_SIZES += ((10**7, "1M<n<10M"), (10**8, "10M<n<100M"), (10**9, "100M<n<1B"), (10**10, "1B<n<10B"))
_CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "equivalentProperty": "cr:equivalentProperty",
    "dct": "http://purl.org/dc/terms/",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileObject": "cr:fileObject",
    "fileProperty": "cr:fileProperty",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}
_FIELDS = {
    "doc_id": ("sc:Text", "Shard file, first token and end of the document."),
    "source": ("sc:Text", "Source of the document."),
    "decision": ("sc:Text", "keep, band or drop: the decision of the grader."),
    "aggregated": ("sc:Float", "Score of the document, 0 to 1."),
}


def totals(corpus: Corpus) -> dict[str, int | None]:
    """Counts over all sources; None if a source does not have the count yet."""
    found: dict[str, int | None] = {"sources": len(corpus.sources)}
    prepared = map(readable_manifest, corpus.manifests())
    made = [one and (one.total_documents, one.total_tokens) for one in prepared]
    kept = [kept_of(corpus.run, name) for name in corpus.sources]
    for names, counts in ((("documents", "tokens"), made), (_kept_names(corpus.run), kept)):
        known = [one for one in counts if one is not None]
        is_whole = bool(known) and len(known) == len(counts)
        sums = [sum(column) for column in zip(*known)] if is_whole else [None] * len(names)
        found |= dict(zip(names, sums))
    return found


def _kept_names(run: Run) -> tuple[str, ...]:
    """The names of the figures of `kept_of` that are shown."""
    names = ("kept", "kept tokens", "tokens with repeats")
    return names[:-1] if run.config.curation.repeat is None else names


def data_card(corpus: Corpus) -> str:
    """The Markdown of the card, with its YAML head."""
    found = totals(corpus)
    name = corpus.name
    head = {
        "pretty_name": name,
        "license": "unknown",
        "language": _languages(corpus),
        "task_categories": ["text-generation"],
        "size_categories": [_size(found["kept"] or found["documents"] or 0)],
        "tags": ["pretraining", "tokenized", "nmoe"],
    }
    yaml = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()]
    parts = ["---", MADE_BY, *yaml, "---", "", f"# {_plain(name)}", "", *_text(corpus, found)]
    return "\n".join(parts) + "\n"


def _text(corpus: Corpus, found: dict[str, int | None]) -> Iterator[str]:
    run = corpus.run
    yield "Token shards for pre-training language models, with a loader plan: the sequences that a"
    yield "run reads. The licences of the sources apply to their texts: name them here."
    yield "\n## Composition\n"
    names = _kept_names(run)
    yield f"| source | from | documents | tokens | {' | '.join(names)} |"
    yield f"|---|---|---|---|{'---|' * len(names)}"
    for source in run_sources(run):
        made = readable_manifest(run.tree.manifest(source.name))
        counts = (made.total_documents, made.total_tokens) if made else ("", "")
        kept = (kept_of(run, source.name) or ("", "", ""))[: len(names)]
        cells = [f"{n:,}" if isinstance(n, int) else n for n in (*counts, *kept)]
        yield f"| {source.name} | {_plain(origin(source.spec))} | {' | '.join(cells)} |"
    if all(path.is_file() for path in corpus.outcomes()):
        yield "\n## Dropped documents\n"
        yield f"A document is kept if this is true: `{rule_of(run)}`\n"
        if run.config.curation.repeat is not None:
            yield f"One pass reads a kept document this often: `{run.config.curation.repeat}`\n"
        try:
            for reason, counts in left_out(run, corpus.sources).items():
                yield f"* {sum(counts.values()):,} documents: {_plain(reason)}"
        except UNREADABLE as error:
            yield f"Cannot be shown: {_plain(one_line(error))}"
    if headers := head_headers(run):
        yield "\n## Graders\n"
        yield "Spearman's correlation with the oracle's scores, with 95 % intervals. No choice used"
        yield "documents of `test`; those of `val` set thresholds, chose the grader if `auto`."
        yield "Alike: documents that resemble one used in training, and Spearman without them.\n"
        yield "| grader | oracle | slice | documents | Spearman | alike | without them |"
        yield "|---|---|---|---|---|---|---|"
        for kind, header in headers.items():
            split = "test" if header.get("test_metrics") else "val"
            metrics = header["test_metrics" if split == "test" else "metrics"]
            oracle = _plain(f"{header['scorer_model']} {header['scorer_version']}")
            names = ("spearman", "spearman_not_alike")
            figures = [with_interval(metrics, name) or "-" for name in names]
            figures.insert(1, metrics.get("num_alike", "-"))
            number = f"{metrics.get('n', 0):,}{in_families(metrics)}"
            row = [kind, oracle, split, number, *figures]
            yield f"| {' | '.join(map(str, row))} |"
    if found["kept"] is not None and run.tree.plan.is_file():
        yield "\n## Use\n"
        yield "    from loader import open_loader"
        yield f'    loader = open_loader("{run.tree.plan.name}", rank=0, world_size=1)'
        yield "    inputs, targets = loader.next()"
    yield "\n## Provenance\n"
    for key, value in facts(corpus).items():
        yield f"* {key}: `{value}`"


def _plain(text: str) -> str:
    """Escape a text for a cell of a Markdown table."""
    line = " ".join(text.split())
    for mark in "\\|<>[]`*_":
        line = line.replace(mark, f"\\{mark}") if mark not in "<>" else line.replace(mark, " ")
    return line


def _size(count: int) -> str:
    return next((name for limit, name in _SIZES if count < limit), "n>1T")


def _languages(corpus: Corpus) -> list[str]:
    if "language" not in corpus.run.config.attributes.use or not all(
        path.is_file() for path in corpus.attribute("language")
    ):
        return []
    try:
        found = [language_shares(corpus.run, name) for name in corpus.sources]
    except UNREADABLE:  # the page shows the error
        return []
    names = {lang for shares in found for lang, share in shares.items() if share >= _LEAST_SHARE}
    return sorted(names - {"und"})


def croissant(corpus: Corpus, base: Path) -> str:
    """The JSON-LD of the corpus, with paths relative to its directory."""
    name = corpus.name
    tree = corpus.run.tree
    made = [path for path in [*corpus.manifests(), *corpus.curated()] if path.is_file()]
    files = [_file(path, base) for path in [*made, *[tree.plan] * tree.plan.is_file()]]
    found = [one for one in map(readable_manifest, made) if one is not None]
    dates = [one.extra.get("created_at", "") for one in found]
    described: dict[str, Any] = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": name,
        "description": "Token shards for pre-training language models, and grades of documents.",
        "license": "https://choosealicense.com/no-permission/",
        "version": "1.0.0",
        "datePublished": max(dates, default="")[:10] or "1970-01-01",
        "citeAs": name,
        "distribution": files,
        "recordSet": [],
    }
    graded = [shard for shard in corpus.shards() if shard.scores.is_file()]
    for shard in graded:
        one = _file(shard.scores, base, "application/jsonlines")
        files.append(one)
        described["recordSet"].append(_records(one["@id"], f"{shard.source}_{shard.bucket:04d}"))
    return json.dumps(described, ensure_ascii=False, indent=2) + "\n"


def _file(path: Path, base: Path, form: str = "application/json") -> dict[str, str]:
    where = Path(os.path.relpath(path.absolute(), base)).as_posix()
    return {
        "@type": "cr:FileObject",
        "@id": where,
        "name": where,
        "contentUrl": where,
        "encodingFormat": form,
        "sha256": sha256_file(path),
    }


def _records(file: str, name: str) -> dict[str, Any]:
    fields = [
        {
            "@type": "cr:Field",
            "@id": f"{name}/{column}",
            "name": column,
            "description": text,
            "dataType": kind,
            "source": {"fileObject": {"@id": file}, "extract": {"column": column}},
        }
        for column, (kind, text) in _FIELDS.items()
    ]
    return {"@type": "cr:RecordSet", "@id": name, "name": name, "field": fields}
