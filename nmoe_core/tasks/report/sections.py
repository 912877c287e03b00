"""The sections of the page: their content, and the tasks that make their inputs."""

import importlib.util
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from loader.files.format import load_manifest, read_json_object
from loader.files.regular import read_file
from loader.plan.file import load_plan
from nmoe_core.base.fingerprint import read_summary
from nmoe_core.base.settings import THRESHOLDS
from nmoe_core.config.run import Run
from nmoe_core.curate.topics.model import load_topic_model
from nmoe_core.labels.compare import panel_agreement
from nmoe_core.labels.jobs import labelling_of
from nmoe_core.quality.calibration.graded import read_grading_summary
from nmoe_core.quality.calibration.summary_file import read_calibration
from nmoe_core.quality.few_labels import FEW_LABELS_SAID, few_labels_table
from nmoe_core.quality.heads.metrics import num_documents
from nmoe_core.report.html import Html, element, note, paragraph, pictures, table
from nmoe_core.report.plots import calibration_plot, kept_picture, png_markdown
from nmoe_core.tasks.attributes import copies_by_source, copies_picture
from nmoe_core.tasks.backbone import backbone_kind
from nmoe_core.tasks.prep import manifest_picture
from nmoe_core.tasks.report.account import account_picture, account_rows, run_account
from nmoe_core.tasks.report.columns import SIGNALS, columns_picture, source_columns, sources_picture
from nmoe_core.tasks.report.corpus import Corpus, Section, kept_of
from nmoe_core.tasks.report.curate_pictures import order_pictures
from nmoe_core.tasks.report.samples import Sample, samples
from nmoe_core.tasks.report.summary import few_labels_of, grader_costs, scoreboard
from nmoe_core.tasks.selection.changes import changed_samples, changed_text
from nmoe_core.tasks.selection.composition import composition, most_moved
from nmoe_core.tasks.selection.outcome import rule_of

_SAMPLES = 5
_PORTIONS = 12


def _composition(corpus: Corpus) -> Iterator[object]:
    run = corpus.run
    rows = []
    found = {name: load_manifest(run.tree.manifest(name)) for name in corpus.sources}
    whole = sum(one.total_tokens for one in found.values())
    for name, one in found.items():
        is_made = run.tree.curated_manifest(name).is_file()
        kept = (kept_of(run, name) if is_made else None) or (None, None, None)
        share = one.total_tokens / max(whole, 1)
        row = [name, one.total_documents, one.total_tokens, _percent(share), *kept]
        rows.append(row if run.config.curation.repeat is not None else row[:-1])
    header = ["source", "documents", "tokens", "share of tokens", "kept", "kept tokens"]
    yield table([*header, "tokens with repeats"][: len(rows[0])], rows)


def _changes(corpus: Corpus) -> Iterator[object]:
    yield paragraph("Share of tokens before and after selection, largest changes first.")
    for kind, portions in composition(corpus.run, corpus.sources).items():
        moved = most_moved(portions, _PORTIONS)
        sizes = {one.name: (one.before, one.after) for one in portions}
        rows = [[name, *sizes[name], _percent(old), _percent(new)] for name, old, new in moved]
        yield table([kind, "tokens", "kept tokens", "share before", "share after"], rows)


def _percent(share: float) -> Html:
    bar = f'<meter min="0" max="1" value="{share:.4f}"></meter>'
    return Html(f"{bar} {100 * share:.1f} %")


def _lengths(corpus: Corpus) -> Iterator[object]:
    found = (load_manifest(corpus.run.tree.manifest(name)) for name in corpus.drawn)
    yield _plots(pictures(manifest_picture(corpus.run, one, "train")) for one in found)


def _languages(corpus: Corpus) -> Iterator[object]:
    rows = []
    for name in corpus.sources:
        shares = language_shares(corpus.run, name)
        shown = [f"{lang} {100 * share:.1f} %" for lang, share in list(shares.items())[:8]]
        rows.append([name, len(shares), ", ".join(shown)])
    yield table(["source", "languages", "share of documents"], rows)


def language_shares(run: Run, source: str) -> dict[str, float]:
    """Share of the documents of a source by language, most first."""
    values = source_columns(run, source, "language", ["lang"])["lang"]
    counts = {name: values.count(name) for name in set(values)}
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return {name: count / len(values) for name, count in ordered}


def _signals(corpus: Corpus) -> Iterator[object]:
    yield paragraph(
        "Some attributes that rules can use; ", element("code", "nmoe sql"), " reads all of them."
    )
    if len(corpus.drawn) > 1:
        yield pictures(sources_picture(corpus.run, corpus.drawn, "signals", SIGNALS))
    draw = partial(columns_picture, corpus.run, attribute="signals", names=SIGNALS)
    yield _plots(pictures(draw(source=name)) for name in corpus.drawn)


def _quality(corpus: Corpus) -> Iterator[object]:
    rows = []
    for name in corpus.sources:
        shards = corpus.run.tree.shards(name, corpus.run.config.prep.num_shards)
        found = [read_grading_summary(shard.graded) for shard in shards]
        counts = [sum(one[key] for one in found) for key in ("total", "kept", "band", "dropped")]
        rows.append([name, *counts, f"{100 * counts[1] / max(counts[0], 1):.1f} %"])
    yield table(["source", "documents", "keep", "band", "drop", "share judged keep"], rows)
    if importlib.util.find_spec("pyarrow") is not None:
        columns = ["aggregated", "q_probe", "decision", *corpus.run.rubric.dimensions]
        draw = partial(columns_picture, corpus.run, attribute="quality", names=columns)
        yield _plots(pictures(draw(source=name)) for name in corpus.drawn)


def _thresholds(corpus: Corpus) -> Iterator[object]:
    summary = read_calibration(corpus.run.tree.calibration_summary)
    found = {name: float(summary[name]) for name in THRESHOLDS if name in summary}
    yield table(["threshold", "value"], list(found.items()))
    names = ("keep_curve", "reliability", "count", "grader")
    made_from = [*found.values(), *(summary.get(name) for name in names)]
    title = "keep rate and reliability"
    kept = corpus.run.tree.picture("report/calibration")
    draw = partial(png_markdown, alt=title)
    yield pictures(kept_picture(kept, made_from, lambda: draw(calibration_plot(summary))))


def _scoreboard(corpus: Corpus) -> Iterator[object]:
    yield paragraph(
        "How well each grader's ranking agrees with the oracle's, on held-out documents, with 95 % "
        "intervals; test labels are not used to choose a grader. Noise ceiling: an estimate of "
        "a perfect grader's correlation with one labelling, if the oracle scored some documents "
        "in two orders of its questions. AUC: the probability that a document from the half that "
        "the oracle scores higher is ranked above a document from the other half. Top fifth: the "
        "share of the grader's top fifth in the oracle's top fifth. Bottom fifth: the share of its "
        "bottom fifth in the oracle's better half. Alike: documents that resemble one used in "
        "training, and Spearman without them."
    )
    names = ("spearman", "spearman_within_source", "auc_better_half", "precision_top_fifth")
    names += ("false_drops_bottom_fifth",)
    ends = ("mae_aggregate", "spearman_source_only", "spearman_length_only")
    rows = []
    for kind, splits in scoreboard(corpus.run).items():
        for split, found in splits.items():
            if found:
                figures = (with_interval(found, name) for name in names)
                last = found["num_alike"], with_interval(found, "spearman_not_alike")
                last += (with_interval(found, "noise_ceiling"),)
                rows.append(
                    [kind, split, num_documents(found), *figures, *map(found.get, ends), *last]
                )
    header = ["grader", "split", "documents", "Spearman", "within source", "AUC", "top fifth"]
    header += ["bottom fifth", "mean error", "source alone", "length alone", "alike"]
    header += ["Spearman without them", "noise ceiling"]
    yield table(header, rows)
    if curve := few_labels_of(corpus.run):
        yield paragraph(FEW_LABELS_SAID)
        yield table(*few_labels_table(curve))
    for cost in grader_costs(corpus.run):
        who = cost["grader"]
        hours = cost["hours_per_million_documents"]
        yield paragraph(f"{who}: {hours:g} h per million documents, measured at calibration.")
    summary = corpus.run.tree.calibration_summary
    choice = read_calibration(summary).get("grader_choice") if summary.is_file() else None
    if choice is not None:
        yield paragraph(choice["sentence"])
    if len(rows) > 1 and backbone_kind(corpus.run) == "tiny":
        yield note("The backbone has random weights: it is a placeholder for a real one.")


def with_interval(found: dict[str, Any], name: str) -> str | None:
    """A figure with its 95 % interval, or None if it is undefined."""
    value = found.get(name)
    bounds = found.get(f"{name}_ci95")
    interval = "" if bounds is None else f" ({bounds[0]:.2f} to {bounds[1]:.2f})"
    return None if value is None else f"{value:.3f}{interval}"


def _duplicates(corpus: Corpus) -> Iterator[object]:
    found = copies_by_source(corpus.run, corpus.sources)
    rows = [
        [*row.values(), f"{100 * (row['exact'] + row['near']) / max(row['documents'], 1):.1f} %"]
        for row in found
    ]
    yield table(["source", "documents", "exact copies", "near copies", "share"], rows)
    yield _plots([pictures(copies_picture(found))])


def _account(corpus: Corpus) -> Iterator[object]:
    plan = load_plan(corpus.run.tree.plan)
    account = run_account(corpus.run, plan)
    yield paragraph(
        "How many files, records, documents and tokens reach training. Each total is the previous "
        "total with the lines between them subtracted or added."
    )
    yield _plots([pictures(account_picture(corpus.run, account))])
    yield table(["", "all sources", *account["sources"]], account_rows(account))


def _left_out(corpus: Corpus) -> Iterator[object]:
    rule = element("code", rule_of(corpus.run))
    yield paragraph("A document is kept if this is true: ", rule)
    for name in corpus.drawn:
        kept, dropped = samples(corpus.run, name, _SAMPLES)
        yield element("h3", name)
        articles = [*(_article(one) for one in kept), *(_article(one) for one in dropped)]
        yield element("div", *articles, kind="texts")


def _article(sample: Sample) -> Html:
    is_kept = not sample.reason
    verdict = element("b", "kept" if is_kept else "left out", kind="good" if is_kept else "bad")
    why = "" if is_kept else f": {sample.reason}"
    text = element("pre", sample.text, dir="auto")
    judged = element("p", sample.judged, ", ", element("code", sample.doc_id), kind="soft")
    kind = "in" if is_kept else "out"
    return element("article", element("p", verdict, why), judged, text, kind=kind)


def _changed_text(corpus: Corpus) -> Iterator[object]:
    rows = changed_text(corpus.run, corpus.sources)
    if not rows:
        yield paragraph("No transform changed a document.")
        return
    yield paragraph(
        "What the transforms replaced before the text was tokenised. Samples are the first changes "
        "of each rule; nmoe explain shows a document before and after."
    )
    yield table(list(rows[0]), [list(row.values()) for row in rows])
    for name in corpus.drawn:
        shown = sampled_changes(corpus.run, name)
        if shown is not None:
            yield element("h3", name)
            yield shown


def sampled_changes(run: Run, source: str) -> Html | None:
    """A table of the first changes of each rule in a source; None if no document was changed."""
    found = changed_samples(run, source, _SAMPLES)
    if not found:
        return None
    shown = [
        [f"{one.transform}/{one.rule}", one.removed, one.replacement, one.ingest_id]
        for one in found
    ]
    return table(["rule", "removed", "replaced by", "document"], shown)


def _diversity(corpus: Corpus) -> Iterator[object]:
    rows = []
    run = corpus.run
    shown = list[Html]()
    for name in corpus.sources:
        found = read_summary(run.tree.curation(name))["diversity"]
        orders = found["concat"]
        means = [(orders[key] or {}).get("mean") for key in ("before", "shuffle", "after")]
        after = orders["after"] or {}
        rows.append([name, *means, after.get("ceiling"), after.get("percent_of_ceiling")])
        if name in corpus.drawn:
            drawn = order_pictures(run, name, run.config.prep.num_shards, found["seq_len"])
            shown += [element("h3", name), _plots([pictures(drawn)])]
    yield paragraph(
        "Mean number of distinct topics in a window that a trainer reads: in source order, "
        "shuffled, and curated. The ceiling is the highest expected mean of any order; a lucky "
        "order may exceed it by a few percent."
    )
    yield table(["source", "before", "shuffle", "after", "ceiling", "% of ceiling"], rows)
    if run.tree.topic_model.is_file():
        yield from _chosen_block(run)
    if run.tree.topic_terms.is_file():
        names = read_json_object(run.tree.topic_terms)["pictures"]
        files = [run.tree.topics / name for name in names]
        drawn = [png_markdown(read_file(path), path.stem) for path in files if path.is_file()]
        yield _plots(map(pictures, drawn))
    yield from shown


def _chosen_block(run: Run) -> Iterator[object]:
    """The block of whose states topics are made, and the figures of the other blocks."""
    if choice := load_topic_model(run.tree.topic_model).choice:
        yield paragraph(
            f"Topics are made of states after block {choice['block']}, whose topics have the "
            "highest silhouette on a sample."
        )
        yield table(["block", "silhouette"], [list(row.values()) for row in choice["silhouettes"]])
        if backbone_kind(run) == "tiny":
            yield note("The backbone has random weights, a placeholder: topics are of chance.")


def _plots(found: Iterable[Html]) -> Html:
    return element("div", *found, kind="plots")


def _labels(corpus: Corpus) -> Iterator[object]:
    rows = labelling_of(corpus.run).without_key().account()
    if agreement := panel_agreement(corpus.run.tree, corpus.run.config.oracle.panel):
        yield paragraph(
            "How far the raters of the panel agree: Krippendorff's alpha of squared differences, "
            "with a 95 % interval, over the n documents that several of them scored."
        )
        yield table(list(agreement[0]), [list(row.values()) for row in agreement])
    if not rows:
        yield paragraph("No model was asked: the labels cost nothing.")
        return
    yield paragraph(
        "All answers of the oracle so far, by model and kind of question. Retries are requests "
        "about a text that had been sent before. The cost is by the prices of [oracle.http]."
    )
    yield table([name.replace("_", " ") for name in rows[0]], [list(row.values()) for row in rows])


def _heads(corpus: Corpus) -> list[Path]:
    tree = corpus.run.tree
    is_student = corpus.run.config.grading.grader == "student"
    return [tree.student] if is_student else [tree.probe, tree.judge]


SECTIONS = (
    Section("composition", "Composition", "prep", Corpus.manifests, _composition),
    Section("account", "Account", "curate", Corpus.planned, _account),
    Section("left-out", "Kept and dropped", "curate", Corpus.outcomes, _left_out),
    Section("changed-text", "Changed text", "prep", Corpus.manifests, _changed_text),
    Section("changes", "Before and after", "curate", Corpus.outcomes, _changes),
    Section("lengths", "Lengths", "prep", Corpus.manifests, _lengths),
    Section(
        "languages",
        "Languages",
        "curate",
        partial(Corpus.attribute, name="language"),
        _languages,
        "language",
    ),
    Section(
        "signals",
        "Signals",
        "curate",
        partial(Corpus.attribute, name="signals"),
        _signals,
        "signals",
    ),
    Section("labels", "Labels", "label", lambda corpus: [], _labels, is_of_graders=True),
    Section("quality", "Quality", "grade", Corpus.graded, _quality, is_of_graders=True),
    Section(
        "thresholds",
        "Thresholds",
        "train_heads",
        lambda corpus: [corpus.run.tree.calibration_summary],
        _thresholds,
        is_of_graders=True,
    ),
    Section(
        "graders", "Scoreboard of graders", "train_heads", _heads, _scoreboard, is_of_graders=True
    ),
    Section(
        "duplicates",
        "Copies",
        "curate",
        partial(Corpus.attribute, name="duplicates"),
        _duplicates,
        "duplicates",
    ),
    Section("diversity", "Diversity", "curate", Corpus.curated, _diversity),
)
