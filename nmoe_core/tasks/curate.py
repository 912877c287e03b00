"""Tasks of curation: topics, curated shards, their manifest, and the loader plan over them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loader.files.addresses import common_parent
from loader.files.regular import read_file
from loader.plan.build import build_plan
from loader.plan.check import check_steps
from nmoe_core.audit.plans.remix import with_remixes
from nmoe_core.base.atomic import replacing, write_bytes
from nmoe_core.base.bucket.paths import shown
from nmoe_core.base.fingerprint import Identity, file_identity
from nmoe_core.base.result import Result
from nmoe_core.base.settings import expert_fingerprints
from nmoe_core.config.run import Run
from nmoe_core.curate.settings import curate_settings, window_tokens
from nmoe_core.tasks.backbone import ids_for_model, load_backbone
from nmoe_core.tasks.checks.contaminated import refuse_contaminated
from nmoe_core.tasks.graph.require import require_inputs
from nmoe_core.tasks.hydra import head_corpus
from nmoe_core.tasks.report.curate_pictures import topic_pictures

if TYPE_CHECKING:
    import numpy as np

    from loader.plan.records import LoaderPlan
    from nmoe_core.curate.topics.assign import Table, TopicSettings
    from nmoe_core.curate.topics.embed import EmbeddingTable
    from nmoe_core.curate.topics.states import StateTable
    from nmoe_core.text.models import ModelIds


def fit_topics(run: Run, sources: Sequence[str]) -> Result:
    """Fit the topic model over all sources; a current model is kept.

    Unless stability is `replan`, curated orders depend on the model, so the model is kept even
    after documents were added.
    """
    from nmoe_core.curate.topics.assign import fit_topic_model
    from nmoe_core.curate.topics.model import load_topic_model

    require_inputs(run, "topic_model", sources)
    table = run.config.curation
    embeddings = embedding_table(run)
    if table.stability != "replan" and run.tree.topic_model.is_file():
        # A new model would reorder old documents, so with a stable order the model is kept.
        result = open_topics(run, sources)
    else:
        result = fit_topic_model(run.tree, sources, embeddings, topic_settings(run))
    model = load_topic_model(run.tree.topic_model)
    topic_pictures(run, sources, embeddings, model, window_tokens(run))  # it names the topics
    return result


def topic_settings(run: Run) -> TopicSettings:
    """The settings of the run's topic model."""
    from nmoe_core.curate.topics.assign import TopicSettings

    table = run.config.curation
    return TopicSettings(table.num_topics, run.loader.seed, table.sample_documents)


def open_topics(run: Run, sources: Sequence[str], *, refit: bool = False) -> Result:
    """The existing topic model; fitted over all sources if it is missing, or on request."""
    from nmoe_core.curate.topics.model import load_topic_model

    path = run.tree.topic_model
    if refit or not path.is_file():
        return fit_topics(run, sources)
    model = load_topic_model(path)
    return Result(model.digest, {"topics": len(model.centroids), "path": shown(path)})


def assign_shard_topics(run: Run, source: str, buckets: Iterable[int]) -> dict[int, Result]:
    """Assign topics to the documents of shards; current shards are kept."""
    from nmoe_core.curate.topics.assign import assign_topics
    from nmoe_core.curate.topics.model import load_topic_model

    table = embedding_table(run)
    model = load_topic_model(run.tree.topic_model)
    return {k: assign_topics(run.tree.shard(source, k), table, model) for k in buckets}


def define_buckets(run: Run, sources: Sequence[str]) -> Result:
    """Define the buckets of the run; a current definition is kept. Raises as `fit_buckets`."""
    from nmoe_core.tasks.selection.buckets import fit_buckets

    require_inputs(run, "buckets", sources)
    return fit_buckets(run, sources)


def curate_shards(run: Run, source: str, buckets: Iterable[int]) -> dict[int, Result]:
    """Filter and order the documents of shards; current shards are kept."""
    from nmoe_core.curate.shards.curated import curate_shard

    settings = curate_settings(run, source)
    return {k: curate_shard(run.tree.shard(source, k), settings) for k in sorted(buckets)}


def index_shards(run: Run, source: str, buckets: Iterable[int]) -> dict[int, Result]:
    """Index curated shards for `nmoe seen`; current indexes are kept."""
    from nmoe_core.audit.seen.index_files import index_shard

    most = run.config.seen.part_tokens
    return {k: index_shard(run.tree.shard(source, k), most) for k in sorted(buckets)}


def combine(run: Run, source: str) -> Result:
    """Write the curated manifest of a source, with the window diversity of all its shards, the
    numbers of dropped documents, and the change of the composition."""
    from nmoe_core.curate.shards.combine import combine_curated
    from nmoe_core.tasks.selection.composition import changes
    from nmoe_core.tasks.selection.outcome import left_out

    require_inputs(run, "manifest", [source])
    num_shards = run.config.prep.num_shards
    settings = curate_settings(run, source)
    result = combine_curated(run.tree, source, num_shards, settings)
    reasons = left_out(run, [source]).items()
    result.facts["left_out"] = [{"documents": of[source], "reason": why} for why, of in reasons]
    result.facts["composition"] = changes(run, [source])
    return result


def make_plan(run: Run, sources: Sequence[str], valid_sources: Sequence[str]) -> Result:
    """Write `mixture/loader_plan.json`, with the run's remixes, unless it is current. Raises the
    errors of `with_remixes`, those of `refuse_contaminated` if the run has a limit, and PlanError
    if a curated source has too few tokens for the flow (E-PLAN-SHORT), or the run needs more steps
    than the flow has (E-PLAN-STEPS)."""
    require_inputs(run, "plan", sources)
    tree = run.tree
    if run.config.contamination.max_share is not None:
        for name in sources:
            refuse_contaminated(run, name)
    plan, remixed = planned_loader(run, sources, valid_sources)
    payload = plan_bytes(run, plan)
    changed = not tree.plan.is_file() or read_file(tree.plan) != payload
    if changed:
        with replacing(tree.plan):
            write_bytes(tree.plan, payload)
    quotas = {f"sequences_{name}": count for name, count in plan.taken().items()}
    facts = {
        "steps": plan.num_sequences // plan.batch_size,
        "sequences": plan.num_sequences,
        "changed": changed,
        **quotas,
        **remixed,
        "path": shown(tree.plan),
    }
    return Result(plan.plan_hash, facts)


def planned_loader(
    run: Run, sources: Sequence[str], valid_sources: Sequence[str]
) -> tuple[LoaderPlan, dict[str, str]]:
    """The loader plan over curated sources with the run's remixes, and facts of the remixes. Raises
    as `make_plan`."""
    from nmoe_core.tasks.selection.bucket_plan import plan_inputs

    tree = run.tree
    inputs = plan_inputs(run, sources)
    plan = build_plan(
        inputs.stages,
        inputs.manifests,
        inputs.settings,
        # data_root can be outside the run's root.
        root=common_parent([tree.root, tree.data]),
        plan_id=f"{run.path.stem}:{run.loader.flow_mode}",
        valid={name: tree.manifest(name, "valid") for name in valid_sources},
    )
    check_steps(plan, run.loader.steps, run.path)
    return with_remixes(plan, tree)


def plan_bytes(run: Run, plan: LoaderPlan) -> bytes:
    """The content of a plan's file."""
    return plan.placed_in(run.tree.plan.parent).to_json().encode()


def embedding_table(run: Run) -> Table:
    """What embeds the run's documents: the terms of its topic model, which need that model only
    when rows are read; the states of the backbone, which is loaded only if states are missing; or
    the backbone's table, opened once per process and again if its files change."""
    from nmoe_core.curate.topics.embed import EmbeddingTable
    from nmoe_core.engine.weights.weight_files import checkpoint_files

    if run.config.curation.topics_from == "terms":
        return EmbeddingTable.of_terms(functools.partial(_terms, run.tree.topic_model))
    if run.config.curation.topics_from == "states":
        return _states(run)
    path = run.tree.checkpoint
    identities = [file_identity(file) for file in checkpoint_files(path)]
    known = tuple(identity for identity in identities if identity is not None)
    model = ids_for_model(run)
    if len(known) < len(identities):
        return EmbeddingTable.open(path, model=model)
    return _opened(path, known, model)


def _terms(path: Path) -> np.ndarray:
    from nmoe_core.curate.topics.model import load_model_of
    from nmoe_core.curate.topics.terms import term_table

    model = load_model_of(path, "terms")
    assert model.terms is not None
    return term_table(model.terms, model.header["vocab_size"])


def _states(run: Run) -> StateTable:
    from nmoe_core.curate.topics.states import StateTable
    from nmoe_core.engine.weights.weight_files import checkpoint_digest

    model = ids_for_model(run)
    made_with = {
        "max_ctx": str(run.config.heads.max_ctx),
        "precision": run.config.backbone.dtype,
        **expert_fingerprints(run.config.backbone.moe_backend),
        **({} if model is None else model.fingerprints),
    }
    digest = checkpoint_digest(run.tree.checkpoint)
    return StateTable(digest, made_with, run.tree, lambda: (load_backbone(run), head_corpus(run)))


@functools.lru_cache(maxsize=1)
def _opened(path: Path, identities: tuple[Identity, ...], model: ModelIds | None) -> EmbeddingTable:
    from nmoe_core.curate.topics.embed import EmbeddingTable

    return EmbeddingTable.open(path, model=model)
