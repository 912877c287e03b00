"""Lists the sources that a run prepares, from the mixture TOML and the flow profile.

A source that several stages use is prepared once, for the sum of their quotas. Stages and flows
only reference `{data_root}/{source}/{split}` and never copy it.
"""

from dataclasses import dataclass
from typing import Any

from loader.plan.mixture import Stage, quotas, resolve_stages
from loader.plan.tables import read_toml
from nmoe_core.base.errors import ConfigError
from nmoe_core.base.strict import validate
from nmoe_core.config.run import Run
from nmoe_core.config.tables import ShardKeys, parse_count
from nmoe_core.prep.settings import PrepSettings
from nmoe_core.sources.spec import SourceSpec

SPLITS = ("train", "valid")


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """One source to prepare: its settings, and the number of training tokens to take (None:
    all)."""

    spec: SourceSpec
    max_tokens: int | None

    @property
    def name(self) -> str:
        return self.spec.id

    @property
    def has_valid(self) -> bool:
        """Whether the mixture names a validation split."""
        return self.spec.split_expression("valid") is not None


def run_stages(run: Run, flow: str | None = None) -> tuple[Stage, ...]:
    """The stages of the run's flow, with token targets and source weights."""
    return resolve_stages(
        run.required("mixture_toml"),
        run.required("flow_profiles_toml"),
        flow or run.required("flow_mode"),
        run.loader.active_params_b,
    )


def run_sources(
    run: Run,
    *,
    flow: str | None = None,
    stage: str | None = None,
    max_tokens: str | int | None = None,
) -> list[SourcePlan]:
    """The sources of the run in mixture order, or only those of `stage`.

    If `flow` or `max_tokens` (the total over all sources) is None, the configured value is used.
    Raises ConfigError if the stage is unknown, or two stages define a source differently.
    """
    stages = [s for s in run_stages(run, flow) if stage in (None, s.name)]
    if not stages:
        known = ", ".join(s.name for s in run_stages(run, flow))
        raise ConfigError("flow has no such stage", where=run.path, found=stage, expected=known)
    mixture_toml = run.required("mixture_toml")
    tables = read_toml(mixture_toml)["mixtures"]
    specs: dict[str, SourceSpec] = {}
    shares: dict[str, float] = {}
    for part in stages:
        total_weight = sum(source.weight for source in part.sources)
        for i, table in enumerate(tables[part.mixture]["sources"]):
            where = f"{mixture_toml} [mixtures.{part.mixture}] source {i}"
            spec = validate(SourceSpec, table, where).with_columns(run.config.attributes.columns)
            other = specs.setdefault(spec.id, spec)
            if [other.columns, other.reading_digest("")] != [spec.columns, spec.reading_digest("")]:
                raise ConfigError(
                    "two mixtures define the same source differently",
                    where=mixture_toml,
                    found=spec.id,
                )
        for source in part.sources:
            share = part.num_tokens * source.weight / total_weight
            shares[source.name] = shares.get(source.name, 0.0) + share
    names = [name for name, share in shares.items() if share > 0]
    asked = run.config.prep.max_tokens if max_tokens is None else max_tokens
    if asked == "all":
        return [SourcePlan(specs[name], None) for name in names]
    whole_flow = sum(stage.num_tokens for stage in stages)
    budget = whole_flow if asked == "flow" else parse_count(asked)
    parts = quotas(budget, [shares[name] for name in names])
    # At least one token, hence one document, so that rounding never removes a source.
    return [SourcePlan(specs[name], max(1, part)) for name, part in zip(names, parts)]


def prep_settings(run: Run, source: SourcePlan, split: str) -> PrepSettings:
    """Prep settings for one split of a source; the token budget applies to training only."""
    prep = run.config.prep
    config = run.config
    is_train = split == "train"
    shared: dict[str, Any] = {key: getattr(prep, key) for key in ShardKeys.model_fields}
    shared["num_shards"] = prep.num_shards if is_train else prep.num_valid_shards
    shared["max_tokens"] = source.max_tokens if is_train else None
    shared["eos_token"] = run.tokenizer.eos_token
    return PrepSettings(
        **shared,
        name=source.name,
        tokenizer=run.tokenizer.name,
        on_error=source.spec.on_error,
        max_bad_share=source.spec.max_bad_share,
        reading_digest=source.spec.reading_digest(split),
        columns=source.spec.columns or (),
        needs_columns=is_train,
        vocab_size=run.loader.vocab_size,
        eos_token_id=run.loader.eos_token_id,
        compute=config.compute.for_work(workers=prep.workers),
    )
