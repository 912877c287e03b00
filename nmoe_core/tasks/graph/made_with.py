"""Reads the settings that outputs record, by the keys of the configuration; empty if missing.

Files of earlier versions record fewer settings; a setting that is not recorded is missing from the
result.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from loader.errors import FormatError
from loader.files.format import read_json_object
from nmoe_core.base.fingerprint import Fingerprints, read_sealed, recorded
from nmoe_core.base.settings import expert_fingerprints
from nmoe_core.config.tree import ShardPaths, Tree
from nmoe_core.curate.topics import states, terms
from nmoe_core.tasks.graph.settings import Settings, curate_keys, prep_keys, selection_keys

# Settings that curated shards record in their fingerprints only if used.
CURATE_OPTIONS = ("where", "epoch", "by", "windows", "resume_from_token")
_TOPIC_KEYS = {
    "num_topics": "curation.num_topics",
    "sample_documents": "curation.sample_documents",
    "seed": "seed",
    "max_ctx": "heads.max_ctx",
    "precision": "backbone.dtype",
}
_TOPICS_FROM = {terms.METHOD: "terms", states.METHOD: "states"}


def _read(path: Path) -> Mapping[str, Any]:
    """A JSON file of a task; empty if the file is missing or damaged, which another part of the
    graph reports."""
    try:
        return read_json_object(path) if path.is_file() else {}
    except FormatError:
        return {}


def shards(shard: ShardPaths) -> Settings:
    """Settings that a shard records."""
    info = _read(shard.manifest).get("source_info") or {}
    return prep_keys(info.get("settings") or {}, shard.source)


def labels(summary: Path) -> Settings:
    """Settings that labels record, from the oracle's facts."""
    made = _read(summary)
    return asked(made.get("oracle", {}), made, made.get("fingerprints") or {})


def asked(facts: Settings, scorer: Settings, made_from: Fingerprints) -> Settings:
    """Settings of an oracle's questions, from its facts, scorer and fingerprints of its labels."""
    named = {f"oracle: {name}": value for name, value in facts.items() if name != "rubric"}
    named["oracle.max_doc_tokens"] = made_from.get("max_doc_tokens")
    named["oracle.max_documents"] = made_from.get("max_documents")
    named["oracle.rubric"] = scorer.get("rubric_hash")
    named["oracle (model)"] = scorer.get("scorer_model")
    named["tokenizer"] = made_from.get("tokenizer")
    return {name: value for name, value in named.items() if value is not None}


def backbone(config: Settings) -> Settings:
    """Settings of a tiny checkpoint, from its `config.json`."""
    from nmoe_core.engine.weights.families import RECIPE_KEY

    recipe = config.get(RECIPE_KEY) or {}
    return {"backbone.seed": recipe.get("seed"), "backbone.family": config.get("model_type")}


def student(header: Settings) -> Settings:
    """Settings that the student records."""
    return _trained(header) | _named(header, {"max_ctx": "oracle.max_doc_tokens"})


def head(header: Settings, kind: Literal["probe", "judge"], *, has_tap: bool) -> Settings:
    """Settings that the probe or the judge records. `has_tap`: whether the run names the block that
    the head reads."""
    made = _trained(header) | _named(header, {"max_ctx": "heads.max_ctx"})
    for name, value in (header.get("settings") or {}).items():
        made["heads.seed" if name == "seed" else f"heads.{kind}.{name}"] = value
    return made | (_named(header, {"tap": f"heads.{kind}.tap"}) if has_tap else {})


def calibration(tree: Tree) -> Settings:
    """Settings that the thresholds record."""
    made = _read(tree.calibration_summary)
    if not made:
        return {}
    found = {f"calibration.{name}": value for name, value in made.get("targets", {}).items()}
    if not found:  # older files record only the main settings
        names = ("target_keep", "target_drop", "max_false_drop")
        found = {f"calibration.{name}": made[name] for name in names if name in made}
    return found | {"grading.grader": "auto" if "grader_choice" in made else made.get("grader")}


def grades(shard: ShardPaths, asked_grader: str) -> Settings:
    """Settings that the scores of a shard record. With `auto`, calibration names the grader."""
    from nmoe_core.quality.calibration.graded import SUMMARY_NAME

    made = _read(shard.graded / SUMMARY_NAME)
    found: dict[str, Any] = {}
    if made.get("grader") in ("hydra", "stacked"):
        names = {"max_ctx": "heads.max_ctx", "early_exit": "grading.early_exit"}
        found = dict(_named(made.get("settings", {}), names))
        backend = (made.get("fingerprints") or {}).get("experts", "")
        found["backbone.moe_backend"] = expert_fingerprints(backend)
    if "grader" in made:
        is_chosen = asked_grader == "auto" and made["grader"] != "none"
        found["grading.grader"] = asked_grader if is_chosen else made["grader"]
    return found


def topic_model(header: Settings) -> Settings:
    """Settings that the topic model records."""
    made = header.get("fingerprints") or {}
    made_from = _TOPICS_FROM.get(made.get("embedding", ""), "backbone")
    found = {"curation.topics_from": made_from} if made else {}
    return found | _named(made, _TOPIC_KEYS)


def duplicates(tree: Tree) -> Settings:
    """Settings that `duplicates` records."""
    made = read_sealed(tree.duplicates) or {}
    return {f"duplicates.{name}": value for name, value in made.get("settings", {}).items()}


def selection(shard: ShardPaths) -> Settings:
    """Settings that the decisions of a source's expressions for a shard record."""
    from nmoe_core.shards.attribute_file import find_footer

    footer = find_footer(shard.selection)
    if footer is None:
        return {}
    made_from = footer.fingerprints
    return selection_keys(made_from.get("where"), made_from.get("repeat"))


def curated(shard: ShardPaths) -> Settings:
    """Settings that a curated shard records."""
    return curated_keys(recorded(shard.curation))


def curated_keys(made_from: Fingerprints | None) -> Settings:
    """The settings in the fingerprints of a curated shard; None for an option that is not used."""
    if made_from is None:
        return {}
    names = ("include", "order", "seed", "tokens_per_shard", *CURATE_OPTIONS)
    return curate_keys({name: made_from.get(name) for name in names})


def _named(values: Settings, names: Mapping[str, str]) -> dict[str, Any]:
    return {key: values[name] for name, key in names.items() if name in values}


def _trained(header: Settings) -> dict[str, Any]:
    training = header.get("training") or {}
    return _named(training, {"use_salvaged": "heads.use_salvaged"})
