"""Lists the sources that a run prepares, from the mixture TOML and the flow profile.

A source that several stages use is prepared once, for the sum of their quotas. Stages and flows
only reference `{data_root}/{source}/{split}` and never copy it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loader.plan import tables
from loader.plan.mixture import Stage, quotas, resolve_stages
from nmoe_core.base.errors import ConfigError
from nmoe_core.base.strict import validate
from nmoe_core.config.run import Run
from nmoe_core.config.tables import ShardKeys, parse_count
from nmoe_core.config.transforms import TransformTable
from nmoe_core.prep.settings import PrepSettings
from nmoe_core.sources.spec import SourceSpec
from nmoe_core.text.transforms.chain import require_columns, require_known_sources, transforms_of

SPLITS = ("train", "valid")


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """One source to prepare, with its settings and the number of training tokens to take (None:
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


@dataclass(frozen=True, slots=True)
class _Flow:
    """The settings that decide which sources a run prepares.

    Attributes:
        mixture_toml, profiles: The files of the mixture and of the flow profiles.
        name: The flow.
        active_params_b: See `RunSettings`.
        max_tokens: The total over all sources, or "all" or "flow".
        columns: Columns that every source passes through.
        transforms: Changes of the text, each of which may name sources.
        path: The configuration, for messages.
    """

    mixture_toml: Path
    profiles: Path
    name: str
    active_params_b: float | None
    max_tokens: str | int
    columns: tuple[str, ...]
    transforms: tuple[TransformTable, ...]
    path: Path

    def stages(self) -> tuple[Stage, ...]:
        """The stages, with token targets and source weights."""
        return resolve_stages(self.mixture_toml, self.profiles, self.name, self.active_params_b)

    def sources(self, only_stage: str | None) -> list[SourcePlan]:
        """See `run_sources`."""
        stages = [stage for stage in self.stages() if only_stage in (None, stage.name)]
        if not stages:
            known = ", ".join(stage.name for stage in self.stages())
            raise ConfigError(
                "flow has no such stage", where=self.path, found=only_stage, expected=known
            )
        specs: dict[str, SourceSpec] = {}
        shares: dict[str, float] = {}
        for part in stages:
            for spec in self._specs(part.mixture):
                other = specs.setdefault(spec.id, spec)
                known_as = [other.columns, other.reading_digest("")]
                if known_as != [spec.columns, spec.reading_digest("")]:
                    raise ConfigError(
                        "two mixtures define the same source differently",
                        where=self.mixture_toml,
                        found=spec.id,
                    )
            total_weight = sum(source.weight for source in part.sources)
            for source in part.sources:
                share = part.num_tokens * source.weight / total_weight
                shares[source.name] = shares.get(source.name, 0.0) + share
        if any(table.sources for table in self.transforms):
            require_known_sources(self.transforms, self._known_sources(), self.path)
        names = [name for name, share in shares.items() if share > 0]
        if self.max_tokens == "all":
            return [SourcePlan(specs[name], None) for name in names]
        whole_flow = sum(stage.num_tokens for stage in stages)
        budget = whole_flow if self.max_tokens == "flow" else parse_count(self.max_tokens)
        parts = quotas(budget, [shares[name] for name in names])
        # The budget is at least one token, and so one document: rounding never removes a source.
        return [SourcePlan(specs[name], max(1, part)) for name, part in zip(names, parts)]

    def _known_sources(self) -> list[str]:
        """The names of all sources of the mixture's file, also those of other flows."""
        mixtures = tables.read_toml(self.mixture_toml)["mixtures"].values()
        return sorted({one["id"] for mixture in mixtures for one in mixture["sources"]})

    def _specs(self, mixture: str) -> Iterator[SourceSpec]:
        """The sources of a mixture, as its file describes them."""
        for i, table in enumerate(
            tables.read_toml(self.mixture_toml)["mixtures"][mixture]["sources"]
        ):
            where = f"{self.mixture_toml} [mixtures.{mixture}] source {i}"
            yield validate(SourceSpec, table, where).with_columns(self.columns)


def _flow(run: Run, name: str | None = None, max_tokens: str | int | None = None) -> _Flow:
    return _Flow(
        run.required("mixture_toml"),
        run.required("flow_profiles_toml"),
        name or run.required("flow_mode"),
        run.loader.active_params_b,
        run.config.prep.max_tokens if max_tokens is None else max_tokens,
        run.config.attributes.columns,
        run.config.transforms,
        run.path,
    )


def run_stages(run: Run, flow: str | None = None) -> tuple[Stage, ...]:
    """The stages of the run's flow, with token targets and the weights of its plan, which are from
    the file `mixture.weights` if the run names one; with buckets, the sums over a source's buckets.
    Raises ConfigError if the file has no weight for a source of a stage, or weights of other
    sources (E-MIX-WEIGHTS)."""
    stages = flow_stages(run, flow)
    weights = own_weights(run)
    if weights is None:
        return stages
    if run.config.mixture.buckets.by:
        summed: dict[str, float] = {}
        for name, weight in weights.items():
            source = name.partition("/")[0]
            summed[source] = summed.get(source, 0) + weight
        weights = summed
    return with_weights(stages, weights, _weights_path(run))


def flow_stages(run: Run, flow: str | None = None) -> tuple[Stage, ...]:
    """The stages of the run's flow with the weights of its mixture."""
    return _flow(run, flow).stages()


def own_weights(run: Run) -> dict[str, float] | None:
    """The weights of the file `mixture.weights`, by name; None if the run names no file. Raises
    ConfigError if the file cannot be read."""
    if run.config.mixture.weights is None:
        return None
    path = _weights_path(run)
    content = tables.read_toml(path)
    tables.refuse_unknown(content, ("weights",), str(path))
    where = f"{path} [weights]"
    given = tables.table(content.get("weights"), where)
    return {name: tables.number(value, f"{where}: {name}") for name, value in given.items()}


def _weights_path(run: Run) -> Path:
    return run.resolve(str(run.config.mixture.weights))


def with_weights(
    stages: Sequence[Stage], weights: Mapping[str, float], path: Path
) -> tuple[Stage, ...]:
    """Stages with the weights of the file `path`, which have no temperature. Raises ConfigError if
    the weights are of other sources than a stage's, or all zero (E-MIX-WEIGHTS)."""
    where = f"{path} [weights]"
    for part in stages:
        names = [source.name for source in part.sources]
        for name in sorted(weights.keys() ^ set(names)):
            raise ConfigError(
                "the weights are of other sources than the stage's",
                where=f"{where}, stage {part.name!r}",
                found=name if name in weights else f"no weight of {name}",
                expected=", ".join(names),
                do="run `nmoe mix --write` again, or correct the file",
                code="E-MIX-WEIGHTS",
            )
        if not any(weights[name] for name in names):
            raise ConfigError("all weights are zero", where=where, code="E-MIX-WEIGHTS")
    return tuple(
        replace(
            part,
            temperature=1.0,
            sources=tuple(
                replace(source, weight=float(weights[source.name]), listed=None)
                for source in part.sources
            ),
        )
        for part in stages
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
    Raises ConfigError if the stage is unknown, two stages define a source differently, or
    `curation.where_by_source` names a source that the configured flow does not have.
    """
    found = _flow(run, flow, max_tokens).sources(stage)
    if flow is None and stage is None:
        _require_known(run)
    return found


def _require_known(run: Run) -> None:
    """Refuse rules of sources that no stage of the run has."""
    rules = run.config.curation.where_by_source
    known = {source.name for part in run_stages(run) for source in part.sources} if rules else set()
    for name in sorted(rules.keys() - known):
        raise ConfigError(
            "curation.where_by_source names a source that the mixture does not have",
            where=run.path,
            found=name,
            expected=", ".join(sorted(known)),
            do="correct the name, or remove the rule",
            code="E-CONFIG-KEY",
        )


def prep_settings(run: Run, source: SourcePlan, split: str) -> PrepSettings:
    """Prep settings for one split of a source; the token budget applies to training only. Raises
    ConfigError if a transform reads a column that is not kept or changes a source of tokens, or the
    EOS of a source of tokens is not the run's."""
    prep = run.config.prep
    config = run.config
    is_train = split == "train"
    tables = transforms_of(config.transforms, source.name)
    transforms = tuple(table.at(run.base) for table in tables)
    require_columns(transforms, source.spec.columns or (), source.name)
    eos_token_id = run.loader.eos_token_id
    if source.spec.kind == "tokens":
        _refuse_transforms(transforms, source.name)
        eos_token_id = eos_token_id if eos_token_id is not None else source.spec.eos_token_id
        _require_eos(source.spec, eos_token_id)
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
        transforms=transforms,
        vocab_size=run.loader.vocab_size,
        eos_token_id=eos_token_id,
        compute=config.compute.for_work(workers=prep.workers),
    )


def _refuse_transforms(transforms: tuple[TransformTable, ...], name: str) -> None:
    if transforms:
        raise ConfigError(
            "transforms change texts, and this source has tokens",
            where=name,
            found=transforms[0].kind,
            do="name the sources of texts in `sources` of the transform",
        )


def _require_eos(spec: SourceSpec, eos_token_id: int | None) -> None:
    if spec.eos_token_id not in (None, eos_token_id):
        raise ConfigError(
            "the EOS of a source of tokens is not the run's",
            where=spec.id,
            found=spec.eos_token_id,
            expected=eos_token_id,
            do="set prep.eos_token and eos_token_id of the run to the token of the files",
        )
