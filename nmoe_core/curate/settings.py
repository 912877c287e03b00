"""Reads the settings of curation from a run's configuration."""

from nmoe_core.config.run import Run
from nmoe_core.curate.shards.planning import CurateSettings


def curate_settings(run: Run, source: str) -> CurateSettings:
    """The settings of the run's `[curation]`; by default, windows have the loader's length."""
    table = run.config.curation
    names = {"include", "repeat", "epoch", "packing", "by", "descending"}
    shared = table.model_dump(include=names)
    consumed = table.resume_from_token.get(source, 0)
    has_buckets = bool(run.config.mixture.buckets.by)
    order = "insert_only" if table.stability == "insert_only" else table.order
    if has_buckets and order == "auto":  # `auto` may fill windows, which would mix buckets
        order = "golden"
    return CurateSettings(
        **shared,
        where=table.where_of(source),
        spread_copies=spreads_copies(run),
        order=order,
        seed=run.loader.seed,
        seq_len=window_tokens(run),
        resume_from_token=consumed if table.stability == "resume" else None,
        tokens_per_shard=run.config.prep.tokens_per_shard,
        has_buckets=has_buckets,
    )


def spreads_copies(run: Run) -> bool:
    """Whether the order spreads copies, so that curation needs the groups of copies."""
    return "duplicates" in run.config.attributes.use and run.config.curation.can_spread_copies


def window_tokens(run: Run) -> int:
    """Tokens per window: the trainer's window, unless the configuration sets another length."""
    stride = run.loader.seq_len + (run.loader.window_stride == "seq_len+1")
    return run.config.curation.seq_len or stride
