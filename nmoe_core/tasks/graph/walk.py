"""The state of every output of a run: current, stale with reasons, missing, or open.

From the sources to the loader plan, it compares the recorded inputs of each output with its current
inputs, by the fingerprints that the task uses, and writes no file. Each summary and each changed
source file is read once; if an earlier walk remembered a key, its files are only counted with
their times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from nmoe_core.base.errors import NmoeError
from nmoe_core.config.attributes import OF_BACKBONE
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.curate.settings import spreads_copies
from nmoe_core.labels.slices import LABEL_SHARDS
from nmoe_core.prep.mixture import SPLITS, SourcePlan, prep_settings
from nmoe_core.tasks.attributes import attribute_names
from nmoe_core.tasks.graph import bucketed, curated, graded, prepared
from nmoe_core.tasks.graph.differences import Look
from nmoe_core.tasks.graph.looked import Reads
from nmoe_core.tasks.graph.states import Graph


def walk(run: Run, sources: Sequence[SourcePlan]) -> Graph:
    """Compute the state of every output of a run. Raises ConfigError as `prep_settings`."""
    graph = Graph(run)
    names = [source.name for source in sources]
    _sources(graph, sources)
    is_off = run.config.grading.is_off
    if not is_off:
        _models(graph, names)
    _scores(graph, names)
    if is_off:
        graph.add("hydra/backbone", "curate", [], partial(graded.backbone, run))
    _attributes(graph, names, [name for name in attribute_names(run) if name not in _first(run)])
    _curation(graph, sources)
    return graph


def _first(run: Run) -> list[str]:
    """Attributes that the thresholds need; these are made directly after the shards."""
    return ["language"] * (run.config.calibration.target_by == "language")


def stale_shards(run: Run, task: str, source: str, buckets: Iterable[int]) -> list[int]:
    """The shards of these in which a task has work, as far as its own inputs tell; all of them if
    an input is missing or damaged."""
    buckets = list(buckets)
    name = task.partition("/")[2]
    try:
        look: Callable[[ShardPaths], Look]
        if name:
            look = prepared.AttributeLooks(run, name).shard
        elif task == "grade":
            look = partial(_graded, Graph(run))
        elif task == "seen":
            look = curated.seen_index
        else:
            looks = curated.CurationLooks(run, [source])
            look = {
                "topics": looks.topics,
                "select": looks.selection,
                "buckets": partial(bucketed.rows, run),
                "curate": looks.curated,
            }[task]
        found = {bucket: look(run.tree.shard(source, bucket)) for bucket in buckets}
        return [b for b, one in found.items() if one.then is None or one.changes()]
    except (NmoeError, OSError):
        return buckets


def _sources(graph: Graph, sources: Sequence[SourcePlan]) -> None:
    run = graph.run
    for source in sources:
        for split in SPLITS:
            if split == "train" or source.has_valid:
                _split(graph, source, split)
        if not run.config.grading.is_off:
            name = source.name
            slices = partial(prepared.slices, run, name)
            reads = prepared.slices_read(run, name)
            graph.add(f"{name}/docid_slices", "prep", [f"{name}/manifest"], slices, reads=reads)
    _attributes(graph, [source.name for source in sources], _first(run), "prep")


def _split(graph: Graph, source: SourcePlan, split: str) -> None:
    task = "prep" if split == "train" else "prep_valid"
    key = f"{source.name}/{prepared.prefix(split)}"
    num_shards = prep_settings(graph.run, source, split).num_shards
    try:
        looks = prepared.SplitLooks(graph.run, source, split)
    except (NmoeError, OSError) as error:
        text = " ".join(str(error).split())
        for bucket in range(num_shards):
            graph.fail(f"{key}shards", task, f"{bucket:04d}", text, [])
        graph.fail(f"{key}manifest", task, "", text, [f"{key}shards"])
        return
    graph.add_shards(f"{key}shards", task, [], looks.shard, num_shards, looks.reads)
    graph.add(f"{key}manifest", task, [f"{key}shards"], looks.manifest, reads=looks.reads)


def _models(graph: Graph, names: Sequence[str]) -> None:
    """Backbone, labels, student, heads and thresholds."""
    run = graph.run
    looks = graph.models
    has_heads = run.config.grading.grader in ("hydra", "auto")
    reads = graded.models_read(run)
    labelled = [f"{name}/{kind}" for name in names for kind in ("docid_slices", "shards")]
    slices = [f"{split}-{number:02d}" for split, number in LABEL_SHARDS]
    if not graph.add_remembered("hydra/oracle_labels", "label", labelled, slices, reads):
        _labels(graph, labelled, slices)
    add = partial(graph.add, task="train_heads", reads=reads)
    graph.add("hydra/backbone", "train_heads", [], partial(graded.backbone, run))
    trained = "hydra/oracle_labels"
    add("hydra/student", inputs=[trained], look=looks.student)
    heads: list[str] = []
    if has_heads:
        heads = ["hydra/probe_head", "hydra/judge_head"]
        inputs = [trained, "hydra/backbone", "hydra/student"]
        add(heads[0], inputs=inputs, look=partial(looks.head, "probe"))
        add(heads[1], inputs=inputs, look=partial(looks.head, "judge"))
    languages = [f"{name}/attributes/language" for name in names] * bool(_first(run))
    inputs = [trained, "hydra/student", *heads, *languages]
    add("hydra/calibration", inputs=inputs, look=looks.calibration)


def _labels(graph: Graph, inputs: Sequence[str], slices: Iterable[str]) -> None:
    """The labels of each slice; their state is unknown if the slices are missing."""
    key = "hydra/oracle_labels"
    try:
        for name, looks in graded.labels(graph.run):
            graph.add(key, "label", inputs, lambda looks=looks: looks, name)
    except (NmoeError, OSError) as error:
        told = [state.partition for state in graph.of(key)]
        text = " ".join(str(error).split())
        for name in slices:
            if name not in told:
                graph.fail(key, "label", name, text, inputs)


def _scores(graph: Graph, names: Sequence[str]) -> None:
    """Scores of every shard."""
    run = graph.run
    for name in names:
        inputs = [f"{name}/shards"]
        if not run.config.grading.is_off:
            inputs += ["hydra/calibration", "hydra/student"]
            inputs += [f"{name}/attributes/language"] * bool(_first(run))
            if run.config.grading.grader != "student":
                inputs += ["hydra/backbone", "hydra/probe_head", "hydra/judge_head"]
        places = run.tree.split(name), run.tree.quality / name
        if _first(run):
            places += (run.tree.attributes / name,)
        reads = Reads(partial(_graded_with, graph), places)
        key = f"{name}/quality_scores"
        _add_shards(graph, key, inputs, partial(_graded, graph), reads, "grade")


def _graded_with(graph: Graph) -> object:
    """The fingerprints that the scores of all shards share."""
    return graded.kept_with() if graph.run.config.grading.is_off else graph.grades.shared


def _add_shards(
    graph: Graph,
    key: str,
    inputs: Sequence[str],
    look: Callable[[ShardPaths], Look],
    reads: Reads,
    task: str,
) -> None:
    """Add the states of all shards that the shards of a source give."""
    run = graph.run
    at = partial(run.tree.shard, key.partition("/")[0])
    num_shards = run.config.prep.num_shards
    graph.add_shards(key, task, inputs, lambda bucket: look(at(bucket)), num_shards, reads)


def _graded(graph: Graph, shard: ShardPaths) -> Look:
    is_off = graph.run.config.grading.is_off
    return graded.unscored(shard) if is_off else graph.grades.shard(shard)


def _attributes(
    graph: Graph, names: Sequence[str], attributes: Sequence[str], task: str = "curate"
) -> None:
    """The named attributes of every shard, and `duplicates` of all shards."""
    run = graph.run
    for attribute in attributes:
        if attribute == "duplicates":
            inputs = [f"{name}/attributes/signatures" for name in names]
            look = partial(prepared.duplicates, run, list(names))
            reads = prepared.duplicates_read(run, names)
            graph.add("curation/duplicates", task, inputs, look, reads=reads)
            continue
        looks = prepared.AttributeLooks(run, attribute)
        for name in names:
            inputs = [f"{name}/shards"] + ["hydra/backbone"] * (attribute in OF_BACKBONE)
            key = f"{name}/attributes/{attribute}"
            _add_shards(graph, key, inputs, looks.shard, looks.reads(name), task)


def _curation(graph: Graph, sources: Sequence[SourcePlan]) -> None:
    """Topics, selection, curated shards and the plan over them."""
    run = graph.run
    names = [source.name for source in sources]
    add = partial(graph.add, task="curate")
    inputs = [f"{name}/manifest" for name in names]
    inputs += ["hydra/backbone"] * run.config.curation.reads_backbone
    look = partial(curated.topic_model, run, names)
    reads = curated.topic_model_reads(run, names)
    add("curation/topic_model", inputs=inputs, look=look, reads=reads)
    looks = curated.CurationLooks(run, names)
    has_buckets = bool(run.config.mixture.buckets.by)
    for name in names:
        _chosen(graph, looks, name)
        if not has_buckets:
            _curated(graph, looks, name)
    if has_buckets:  # they are defined over the kept documents of all sources
        _buckets(graph, names)
        for name in names:
            _curated(graph, looks, name)
    inputs = [f"{name}/curated_manifest" for name in names]
    valid = [source.name for source in sources if source.has_valid]
    inputs += [f"{name}/valid_manifest" for name in valid]
    look = partial(curated.loader_plan, run, names, valid)
    reads = curated.loader_plan_reads(run, names, valid)
    add("mixture/loader_plan", inputs=inputs, look=look, reads=reads)


def _chosen(graph: Graph, looks: curated.CurationLooks, name: str) -> None:
    """Topics and selection of one source."""
    add = partial(_add_shards, graph, task="curate")
    inputs = [f"{name}/shards", "curation/topic_model"]
    add(f"{name}/topics", inputs, looks.topics, looks.topics_read(name))
    if graph.run.config.curation.rules(name):
        inputs = [*_kept_from(graph.run, name)[:3], *_attributes_of(graph.run, name)]
        add(f"{name}/selection", inputs, looks.selection, looks.selection_reads(name))


def _kept_from(run: Run, name: str) -> list[str]:
    """Keys from which the documents of a source are chosen."""
    kinds = ["shards", "quality_scores", "topics"]
    kinds += ["selection"] * bool(run.config.curation.rules(name))
    return [f"{name}/{kind}" for kind in kinds]


def _attributes_of(run: Run, name: str) -> list[str]:
    """Keys of the attributes that rules and buckets of a source may read."""
    attributes = [f"{name}/attributes/{one}" for one in attribute_names(run)]
    return [*attributes, "curation/duplicates"]


def _buckets(graph: Graph, names: Sequence[str]) -> None:
    """The definition of buckets, and the buckets of documents."""
    run = graph.run
    inputs = ["curation/topic_model"]
    for name in names:
        inputs += [*_kept_from(run, name), *_attributes_of(run, name)]
    look = partial(bucketed.definition, run, names)
    reads = bucketed.definition_reads(run, names)
    graph.add("curation/buckets", "curate", [*dict.fromkeys(inputs)], look, reads=reads)
    for name in names:
        inputs = [*_kept_from(run, name)[:3], *_attributes_of(run, name), "curation/buckets"]
        look = partial(bucketed.rows, run)
        _add_shards(graph, f"{name}/buckets", inputs, look, bucketed.rows_read(run, name), "curate")


def _curated(graph: Graph, looks: curated.CurationLooks, name: str) -> None:
    """Curated shards of one source, their indexes and manifest."""
    run = graph.run
    add = partial(_add_shards, graph, task="curate")
    read = _kept_from(run, name)
    read += [f"{name}/buckets"] * bool(run.config.mixture.buckets.by)
    if spreads_copies(run):
        read.append("curation/duplicates")
    made = f"{name}/curated"
    add(made, read, looks.curated, looks.curated_reads(name))
    if run.config.seen.index:
        reads = curated.seen_index_reads(run, name)
        add(f"{name}/seen_index", [made], curated.seen_index, reads)
    look = partial(curated.curated_manifest, run, name)
    inputs = [made, f"{name}/manifest"]
    reads = curated.curated_manifest_reads(run, name)
    graph.add(f"{name}/curated_manifest", "curate", inputs, look, reads=reads)
