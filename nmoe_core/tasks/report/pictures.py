"""Pictures of single outputs, drawn when somebody looks at them and kept beside the run."""

from __future__ import annotations

from collections.abc import Callable

from loader.files.format import load_manifest, read_json_object
from loader.plan.file import load_plan
from nmoe_core.base.errors import ConfigError
from nmoe_core.config.attributes import KEYS
from nmoe_core.config.run import Run
from nmoe_core.curate.settings import curate_settings, window_tokens
from nmoe_core.prep.mixture import run_sources
from nmoe_core.report.plots import (
    calibration_plot,
    columns_plot,
    kept_picture,
    loss_plot,
    png_markdown,
)
from nmoe_core.tasks.attributes import copies_by_source, copies_picture, shard_attribute_names
from nmoe_core.tasks.prep import manifest_picture
from nmoe_core.tasks.report.account import account_picture
from nmoe_core.tasks.report.buckets import buckets_picture, plan_buckets
from nmoe_core.tasks.report.columns import signals_picture
from nmoe_core.tasks.report.curate_pictures import order_picture, order_pictures, topic_pictures


def picture_of(run: Run, key: str, partition: str = "") -> str:
    """Markdown with the pictures of one output, which has the key and the partition that `nmoe
    plan` shows. A picture is drawn unless a current one is kept.

    Raises:
        ConfigError: The run has no pictures of such an output (E-CONFIG-OUTPUT).
        FormatError: The output is not made yet, or is damaged.
    """
    names = [source.name for source in run_sources(run)]
    source, _, kind = key.partition("/")
    of_shard = partition.isdecimal() and int(partition) < run.config.prep.num_shards
    if key in _OF_RUN and not partition:
        return _OF_RUN[key](run, names)
    if source in names and kind in _OF_SOURCE and not partition:
        return _OF_SOURCE[kind](run, source)
    if source in names and of_shard:
        if kind == "curated":
            seq_len = curate_settings(run, source).seq_len
            return order_picture(run.tree.shard(source, int(partition)), seq_len)
        attribute = kind.removeprefix("attributes/")
        if kind == f"attributes/{attribute}" and attribute in shard_attribute_names(run):
            return attribute_picture(run, source, attribute, int(partition))
    raise ConfigError(
        "the run has no pictures of this output",
        where=run.path,
        found=f"{key}:{partition}".rstrip(":"),
        expected="a key such as web/curated:0003",
        code="E-CONFIG-OUTPUT",
    )


def attribute_picture(run: Run, source: str, name: str, bucket: int) -> str:
    """Markdown with small histograms of an attribute's columns in a shard."""
    from nmoe_core.shards.attribute_file import read_attribute, read_footer

    path = run.tree.shard(source, bucket).attribute(name)
    title = f"{source}: {name}"

    def draw() -> str:
        table = read_attribute(path)
        columns = {n: table.column(n).to_pylist() for n in table.column_names if n not in KEYS}
        return png_markdown(columns_plot(columns, title, scale=1), title)

    kept = run.tree.picture(f"attributes/{source}/{name}_{bucket:04d}")
    return kept_picture(kept, [title, read_footer(path).digest], draw)


def _loss(run: Run, kind: str) -> str:
    from nmoe_core.quality.heads.head_files import read_header

    path = run.tree.probe if kind == "probe" else run.tree.judge
    curve = read_header(path)["training"]["loss_curve"]
    if not curve:  # a ridge regression has no steps
        return ""
    return png_markdown(loss_plot({kind: curve}), f"loss of the {kind}")


def _thresholds(run: Run, sources: list[str]) -> str:
    from nmoe_core.quality.calibration.summary_file import read_calibration

    picture = calibration_plot(read_calibration(run.tree.calibration_summary))
    return png_markdown(picture, "keep rate and reliability")


def _topics(run: Run, sources: list[str]) -> str:
    from nmoe_core.curate.topics.model import load_topic_model
    from nmoe_core.tasks.curate import embedding_table

    model = load_topic_model(run.tree.topic_model)
    return topic_pictures(run, sources, embedding_table(run), model, window_tokens(run))


def _account(run: Run, sources: list[str]) -> str:
    buckets = plan_buckets(run, load_plan(run.tree.plan))
    drawn = [
        buckets_picture(run, buckets) if buckets else "",
        account_picture(run, read_json_object(run.tree.account)),
        signals_picture(run, sources),
    ]
    return "\n\n".join(filter(None, drawn))


def _lengths(run: Run, source: str, split: str) -> str:
    return manifest_picture(run, load_manifest(run.tree.manifest(source, split)), split)


def _orders(run: Run, source: str) -> str:
    seq_len = curate_settings(run, source).seq_len
    return order_pictures(run, source, run.config.prep.num_shards, seq_len)


_OF_RUN: dict[str, Callable[[Run, list[str]], str]] = {
    "hydra/probe_head": lambda run, sources: _loss(run, "probe"),
    "hydra/judge_head": lambda run, sources: _loss(run, "judge"),
    "hydra/calibration": _thresholds,
    "curation/duplicates": lambda run, sources: copies_picture(copies_by_source(run, sources)),
    "curation/topic_model": _topics,
    "mixture/loader_plan": _account,
}
_OF_SOURCE: dict[str, Callable[[Run, str], str]] = {
    "manifest": lambda run, source: _lengths(run, source, "train"),
    "valid_manifest": lambda run, source: _lengths(run, source, "valid"),
    "curated_manifest": _orders,
}
