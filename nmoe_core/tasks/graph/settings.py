"""The settings that affect each output, by the keys of the configuration.

These functions are the only place that says which settings affect an output. Dagster's code version
is a digest of an output's settings, and `nmoe plan` names their keys. Settings that do not change
the output (workers, batches, retries, checks, automation) are not listed. Fingerprints cover the
content of files. Imports no torch, because loading definitions imports this module.
"""

import dataclasses
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from loader.errors import NmoeError, without_credentials
from loader.plan.settings import PlanSettings
from nmoe_core.attributes import CODES
from nmoe_core.audit.seen import SEEN_CODE
from nmoe_core.base.errors import SourceError
from nmoe_core.base.fingerprint import sha256_file, sha256_json
from nmoe_core.base.settings import expert_fingerprints
from nmoe_core.config.attributes import OF_BACKBONE
from nmoe_core.config.renamed import RENAMED
from nmoe_core.config.run import Run
from nmoe_core.config.tables import ShardKeys
from nmoe_core.curate.buckets import BUCKETS_CODE
from nmoe_core.curate.settings import curate_settings
from nmoe_core.curate.shards.planning import CURATE_CODE
from nmoe_core.curate.takedown.record import record_digest
from nmoe_core.curate.topics import ASSIGN_CODE, MODEL_FORMAT
from nmoe_core.labels.label import LABEL_CODE
from nmoe_core.labels.scores import Scale
from nmoe_core.labels.slices import SLICE_CODE
from nmoe_core.prep.mixture import SourcePlan, own_weights, prep_settings, run_stages
from nmoe_core.prep.settings import PREP_CODE
from nmoe_core.quality.calibration import CALIBRATE_CODE
from nmoe_core.quality.grading import GRADE_CODE
from nmoe_core.quality.heads import STUDENT_CODE, TRAIN_CODE
from nmoe_core.shards.publish.send import RECORD_FORMAT
from nmoe_core.sources.forms.strings import Set, set_revision

Settings = Mapping[str, Any]
# Connection and retries of an oracle, which do not change its answers.
_WORK_OF_ORACLE = {"max_retries", "relabel", "engine", "http", "panel"}
_WORK_OF_ENGINE = {"device", "batch_size"}
_WORK_OF_HTTP = {
    *("base_url", "api_key_env", "allow_key_over_http", "concurrency", "timeout_s"),
    *("max_attempts", "max_outage_s", "max_reply_bytes", "accept_model", "input_price"),
    *("output_price", "max_cost", "headers", "api_key_header"),
}
# Keys that were added later. Their defaults are left out, so that no earlier version changes.
_ADDED = {
    "oracle.max_documents": 20_000,
    "oracle.http.served": "one",
    "oracle.http.omit": [],
    "curation.where_by_source": None,
    "curation.repeat": None,
    "duplicates.count_copies": False,
    "contamination.min_words": 8,
    "duplicates.repeated_tokens": None,
    "duplicates.count_licences": False,
}
# Earlier names of keys. Digests still use the earlier names, so that a renamed key makes no output
# stale.
_IN_DIGESTS = {new: old for old, new in RENAMED.items()}
# Fields of `PrepSettings` that are not keys of [prep].
_PREP_KEYS = {"tokenizer": "tokenizer", "columns": "attributes.columns", "transforms": "transforms"}
_PREP_READING = ("on_error", "reading_digest")
_PREP_FIXED = ("name", "normalizer", "unicode")
# Fields of `CurateSettings` whose keys have another name or another table.
_CURATE_KEYS = {"seed": "seed", "tokens_per_shard": "prep.tokens_per_shard"}


class MadeWith(NamedTuple):
    """The code version of an output, and the settings that it reads."""

    code: str
    settings: Settings

    @property
    def version(self) -> str:
        """The code version, such as `grade/2+1a2b3c4d5e6f`: short, since the UI shows it often."""
        changed = {k: value for k, value in self.settings.items() if _ADDED.get(k, ...) != value}
        settings = {_IN_DIGESTS.get(key, key): value for key, value in changed.items()}
        return f"{self.code}+{sha256_json(settings)[:12]}"


SLICES = MadeWith(SLICE_CODE, {})
TOPICS = MadeWith(ASSIGN_CODE, {})
PUT_IN_BUCKETS = MadeWith(BUCKETS_CODE, {})
SEEN_INDEX = MadeWith(SEEN_CODE, {})  # the number of tokens per part does not affect answers


def prep(run: Run, source: SourcePlan, split: str) -> MadeWith:
    """Settings of token shards and of their manifest."""
    return MadeWith(PREP_CODE, prep_keys(prep_settings(run, source, split).identity(), source.name))


def prep_keys(identity: Settings, source: str) -> dict[str, Any]:
    """Settings of prep, as shards record them, by the keys of the configuration."""
    found = {}
    for name, value in identity.items():
        if name in _PREP_READING:
            found[f"mixture of {source}: {name}"] = value
        elif name not in _PREP_FIXED:
            is_own = name in ShardKeys.model_fields or name == "max_tokens"
            found[f"prep.{name}" if is_own else _PREP_KEYS[name]] = value
    return found


def backbone(run: Run) -> MadeWith:
    """Settings of the checkpoint: its path or, for kind `tiny`, its seed."""
    table = run.config.backbone
    names = ("kind", "family", "seed") if table.kind == "tiny" else ("kind", "checkpoint")
    return MadeWith("backbone/1", {f"backbone.{name}": getattr(table, name) for name in names})


def labels(run: Run) -> MadeWith:
    """Settings of oracle labels: the oracle, and the length of the text that it reads."""
    table = run.config.oracle
    asked = table.model_dump(mode="json", exclude=_WORK_OF_ORACLE)
    found = {f"oracle.{name}": value for name, value in asked.items()}
    found["oracle.rubric"] = [run.rubric.hash, Scale.of(run.rubric).in_file()]
    found["tokenizer"] = run.tokenizer.encoding
    if table.kind == "engine":
        asked = table.engine.model_dump(mode="json", exclude=_WORK_OF_ENGINE)
        found |= {f"oracle.engine.{name}": value for name, value in asked.items()}
    tables = {"http": table.http} if table.kind == "http" else {}
    if table.kind == "panel":
        tables = {f"panel.{name}": http for name, http in table.panel.items()}
    else:
        del found["oracle.combine"]
    for key, http in tables.items():
        asked = {} if http is None else http.model_dump(mode="json", exclude=_WORK_OF_HTTP)
        found |= {f"oracle.{key}.{name}": value for name, value in asked.items()}
    changed = {key: value for key, value in found.items() if _ADDED.get(key, ...) != value}
    return MadeWith(LABEL_CODE, changed)


def student(run: Run) -> MadeWith:
    """Settings of the student. How much text the student reads is not listed: it equals `[oracle]
    max_doc_tokens`, which is a setting of the labels."""
    found = {"heads.use_salvaged": run.config.heads.use_salvaged}
    return MadeWith(STUDENT_CODE, found | _family(run))


def head(run: Run, kind: Literal["probe", "judge"]) -> MadeWith:
    """Settings of the probe or the judge."""
    table = run.config.heads
    recipe = table.probe.recorded if kind == "probe" else table.judge.model_dump(mode="json")
    found = {f"heads.{kind}.{name}": value for name, value in recipe.items()}
    shared = ("max_ctx", "seed", "use_salvaged")
    found |= {f"heads.{name}": getattr(table, name) for name in shared}
    return MadeWith(TRAIN_CODE, found | _family(run))


def calibration(run: Run) -> MadeWith:
    """Settings of the thresholds."""
    settings = run.config.calibration.targets
    found = {f"calibration.{name}": value for name, value in settings.items()}
    return MadeWith(CALIBRATE_CODE, found | _grader(run) | _family(run))


def _family(run: Run) -> dict[str, Any]:
    """The families of documents, if the run has any: cards and thresholds depend on them."""
    family = run.config.calibration.family
    return {} if family is None else {"calibration.family": family.identity}


def grades(run: Run) -> MadeWith:
    """Settings of scores, and of the regrade plan."""
    found = _grader(run)
    if run.config.grading.grader in ("hydra", "auto"):
        found["grading.early_exit"] = run.config.grading.early_exit
    return MadeWith(GRADE_CODE, found)


def _grader(run: Run) -> dict[str, Any]:
    """The grader, and the MoE backend of its backbone; backends that compute in the model's
    precision count as equal."""
    found: dict[str, Any] = {"grading.grader": run.config.grading.grader}
    if run.config.grading.grader in ("hydra", "auto"):
        found["heads.max_ctx"] = run.config.heads.max_ctx
        found["backbone.moe_backend"] = expert_fingerprints(run.config.backbone.moe_backend)
    return found


def topic_model(run: Run) -> MadeWith:
    """Settings of the topic model."""
    table = run.config.curation
    found = {
        "curation.topics_from": table.topics_from,
        "curation.num_topics": table.num_topics,
        "curation.sample_documents": table.sample_documents,
        "seed": run.loader.seed,
    }
    if table.topics_from == "states":
        backbone = run.config.backbone
        found |= {"heads.max_ctx": run.config.heads.max_ctx, "backbone.dtype": backbone.dtype}
        found["backbone.moe_backend"] = expert_fingerprints(backbone.moe_backend)
    return MadeWith(MODEL_FORMAT, found)


def curated(run: Run, source: str) -> MadeWith:
    """Settings of curated shards."""
    settings = curate_settings(run, source)
    found = curate_keys(settings.fingerprints()) | {"seq_len": settings.seq_len}
    takedown = record_digest(run.tree, source)
    return MadeWith(CURATE_CODE, found | ({"takedown": takedown} if takedown else {}))


def curate_keys(fingerprints: Settings) -> dict[str, Any]:
    """Settings of curation, as shards record them, by the keys of the configuration."""
    named = {k: value for k, value in fingerprints.items() if k not in ("code", "where")}
    found = {_CURATE_KEYS.get(name, f"curation.{name}"): value for name, value in named.items()}
    return found | (rule_keys(fingerprints["where"]) if "where" in fingerprints else {})


def rule_keys(where: str | None) -> dict[str, Any]:
    """The expressions of a source, as `CurationTable.where_of` records them, by their keys; None
    for one that is not set."""
    rules = json.loads(where) if where and where.startswith('["') else [where, None]
    return dict(zip(("curation.where", "curation.where_by_source"), rules, strict=True))


def selection_keys(where: str | None, repeat: str | None) -> dict[str, Any]:
    """The settings of a selection, by their keys; None for one that is not set."""
    return rule_keys(where) | {"curation.repeat": repeat}


def attribute(run: Run, name: str) -> MadeWith:
    """Settings of an attribute: its table with the digests of its evaluation files (these are not
    assets) or of its code and model, or the files that it joins."""
    config = run.config
    if (files := config.attributes.files.get(name)) is not None:
        return MadeWith(CODES["join"], {f"attributes.files.{name}": files})
    if (table := config.attributes.functions.get(name)) is not None:
        made_with: Settings = table.model_dump(mode="json")
        with suppress(NmoeError):  # definitions must load; the task then raises the error
            made_with = table.at(run.base).made_with
        found = {f"attributes.{name}.{key}": value for key, value in made_with.items()}
        return MadeWith(CODES["function"], found)
    if name == "contamination":
        sets = config.contamination.evaluations.items()
        read = {key: _revision(one, run.base) for key, one in sets}
        found = {"evaluations": read, "min_words": config.contamination.min_words}
        return MadeWith(CODES[name], {f"contamination.{key}": one for key, one in found.items()})
    if name == "duplicates":
        keys = config.duplicates.model_dump(mode="json")
        return MadeWith(CODES[name], {f"duplicates.{key}": value for key, value in keys.items()})
    found = {}
    if name in OF_BACKBONE:
        recorded = getattr(config.attributes, name).model_dump(mode="json")
        found = {f"attributes.{name}.{key}": value for key, value in recorded.items()}
        found["backbone.dtype"] = config.backbone.dtype
        found["backbone.moe_backend"] = expert_fingerprints(config.backbone.moe_backend)
    return MadeWith(CODES[name], found)


def _revision(one: Set, base: Path) -> str:
    """The revision of an evaluation set. Definitions must load even if a file is missing; the task
    then raises the error."""
    try:
        return set_revision(one, base)
    except SourceError:
        return ""


def selection(run: Run, source: str) -> MadeWith:
    """Settings of the decisions of a source's expressions for each document."""
    table = run.config.curation
    return MadeWith(CODES["select"], selection_keys(table.where_of(source), table.repeat))


def buckets(run: Run) -> MadeWith:
    """Settings of the definition of buckets."""
    found = run.config.mixture.buckets.model_dump(mode="json")
    return MadeWith(BUCKETS_CODE, {f"mixture.buckets.{key}": one for key, one in found.items()})


def curated_manifest(run: Run, source: str) -> MadeWith:
    """Settings of the curated manifest, whose figures depend on the window length."""
    found = {"prep.num_shards": run.config.prep.num_shards}
    return MadeWith(CURATE_CODE, found | {"seq_len": curate_settings(run, source).seq_len})


def loader_plan(run: Run) -> MadeWith:
    """Settings of the loader plan, with its remixes."""
    made_by = dataclasses.asdict(run.loader)
    names = [field.name for field in dataclasses.fields(PlanSettings)]
    found = {name: made_by[name] for name in names if made_by[name] != ()}
    found["flow_mode"] = run.loader.flow_mode
    found["mixture"] = [dataclasses.asdict(s, dict_factory=_chosen) for s in run_stages(run)]
    if run.config.mixture.buckets.by:
        found["mixture.buckets.by"] = run.config.mixture.buckets.by
        found["mixture.weights"] = own_weights(run)
    found["name of the configuration"] = run.path.stem
    remixes = [sha256_file(path) for path in run.tree.remixes()]
    return MadeWith("plan/1", found | ({"remixes": remixes} if remixes else {}))


def _chosen(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict without a `max_epochs` that is not set, so that plans from before it stay current."""
    return {key: value for key, value in pairs if (key, value) != ("max_epochs", 0)}


def published_plan(run: Run) -> MadeWith:
    """Settings of a published plan: its URL, and the format of its records."""
    found = {"publish.url": without_credentials(run.config.publish.url), "record": RECORD_FORMAT}
    return MadeWith("publish/1", found)
