"""Code version of each task: a digest of its code's version and the settings that it reads.

A version is the code's own and a digest of exactly the settings that the task reads. What only says
how work is done (workers, batches, retries, checks, automation) changes no version; content of
files is for fingerprints. Imports no torch: definitions are loaded with it.
"""

import dataclasses
from typing import Any, Literal

from loader.errors import without_credentials
from loader.plan.settings import PlanSettings
from nmoe_core.attributes import CODES
from nmoe_core.base.fingerprint import local_digest, sha256_file, sha256_json
from nmoe_core.base.settings import expert_fingerprints
from nmoe_core.calibration import CALIBRATE_CODE
from nmoe_core.config.quality import CalibrationTable, OracleTable
from nmoe_core.config.run import Run
from nmoe_core.curate.shards.planning import CURATE_CODE
from nmoe_core.curate.topics import ASSIGN_CODE, MODEL_FORMAT
from nmoe_core.grading import GRADE_CODE
from nmoe_core.heads import STUDENT_CODE, TRAIN_CODE
from nmoe_core.labels.label import LABEL_CODE
from nmoe_core.labels.scores import Scale
from nmoe_core.labels.slices import SLICE_CODE
from nmoe_core.prep.mixture import SourcePlan, prep_settings, run_stages
from nmoe_core.prep.settings import PREP_CODE
from nmoe_core.publish.send import RECORD_FORMAT
from nmoe_core.seen import SEEN_CODE
from nmoe_core.takedown.record import record_digest
from nmoe_core.tasks.curate import curate_settings

SLICES, TOPICS = SLICE_CODE, ASSIGN_CODE  # they read no setting
# How an oracle is reached and how often it is asked; a place does not change what it answers.
_OF_THE_ORACLES_WORK = {
    "oracle": {"replace", "retry_failed", "engine", "http"},
    "engine": {"device", "max_batch"},
    "http": {
        *("base_url", "api_key_env", "concurrency", "timeout_s", "max_attempts", "max_outage_s"),
        *("max_reply_bytes", "accept_model", "input_price", "output_price", "max_cost"),
    },
}


def prep(run: Run, source: SourcePlan, split: str) -> str:
    return _version(PREP_CODE, prep_settings(run, source, split).identity())


def backbone(run: Run) -> str:
    """Of the checkpoint: which one, or the seed of a stand-in."""
    table = run.config.backbone
    return _version("backbone/1", [table.kind, table.family, table.checkpoint, table.seed])


def labels(run: Run) -> str:
    """Of oracle labels: it depends on who is asked, and on how much of a document is shown."""
    table, hidden = run.config.oracle, _OF_THE_ORACLES_WORK
    asked = table.model_dump(mode="json", exclude=hidden["oracle"])
    if table.kind == "engine":
        asked["engine"] = table.engine.model_dump(mode="json", exclude=hidden["engine"])
    if table.kind == "http" and table.http is not None:
        # An empty one changes no request: labels made before the key was there stay current.
        unset = set() if table.http.extra_body else {"extra_body"}
        asked["http"] = table.http.model_dump(mode="json", exclude=hidden["http"] | unset)
    if table.rubric != OracleTable().rubric:
        asked["rubric"] = [run.rubric.hash, Scale.of(run.rubric).in_file()]
    return _version(LABEL_CODE, [run.tokenizer.encoding, asked])


def student(run: Run) -> str:
    """Of the student, which reads what the oracle of its labels read: those change with it."""
    return _version(STUDENT_CODE, [run.config.heads.use_salvaged])


def head(run: Run, kind: Literal["probe", "judge"]) -> str:
    table = run.config.heads
    recipe = (table.probe if kind == "probe" else table.judge).model_dump(mode="json")
    return _version(TRAIN_CODE, [table.max_ctx, table.seed, table.use_salvaged, recipe])


def calibration(run: Run) -> str:
    settings = run.config.calibration.model_dump(mode="json")
    for name, value in CalibrationTable().model_dump(mode="json").items():
        # Calibrations made before these keys stay current.
        if name in ("target_unit", "target_by", "target_of") and settings[name] == value:
            del settings[name]
    return _version(CALIBRATE_CODE, [run.config.heads.max_ctx, settings, *_grader(run)])


def grades(run: Run) -> str:
    """Of scores, and of the plan of a regrade."""
    asked = [run.config.heads.max_ctx, run.config.grading.early_exit]
    return _version(GRADE_CODE, [*asked, *_grader(run)])


def _grader(run: Run) -> list[str]:
    """Who grades, and how its backbone multiplies by experts; nothing of the defaults, so that what
    was made before these settings is current."""
    grader, experts = run.config.grading.grader, run.config.backbone.experts
    way = [] if grader == "student" else expert_fingerprints(experts).values()
    return [*([] if grader == "hydra" else [grader]), *way]


def topic_model(run: Run) -> str:
    table = run.config.curation
    return _version(MODEL_FORMAT, [table.num_topics, table.sample_documents, run.loader.seed])


def curated(run: Run, source: str) -> str:
    settings = curate_settings(run, source)
    read = [settings.fingerprints(), settings.seq_len]
    takedown = record_digest(run.tree, source)
    return _version(CURATE_CODE, [*read, takedown] if takedown else read)


def attribute(run: Run, name: str) -> str:
    """Of an attribute: its settings and the texts of its evaluations, which are no asset; or the
    files that it joins."""
    config = run.config
    if (files := config.attributes.files.get(name)) is not None:
        return _version(CODES["join"], files)
    if name == "contamination":
        paths = {key: run.resolve(path) for key, path in config.contamination.evaluations.items()}
        # The task refuses a missing file; definitions load without it.
        read = {key: local_digest(path) if path.is_file() else "" for key, path in paths.items()}
        return _version(CODES[name], read)
    return _version(CODES[name], config.duplicates.identity if name == "duplicates" else None)


def selection(run: Run) -> str:
    return _version(CODES["select"], run.config.curation.where)


def seen_index() -> str:
    return SEEN_CODE  # how much is sorted at once changes no answer


def curated_manifest(run: Run, source: str) -> str:
    """Of the curated manifest, whose figures depend on the size of windows."""
    num_shards = run.config.prep.num_shards
    return _version(CURATE_CODE, [num_shards, curate_settings(run, source).seq_len])


def loader_plan(run: Run) -> str:
    stages = [dataclasses.asdict(stage) for stage in run_stages(run)]
    made_by = dataclasses.asdict(run.loader)
    names = [field.name for field in dataclasses.fields(PlanSettings)]
    settings = {name: made_by[name] for name in names if made_by[name] != ()}
    remixes = [sha256_file(path) for path in run.tree.remixes()]
    read = [run.path.stem, run.loader.flow_mode, stages, settings]
    return _version("plan/1", [*read, remixes] if remixes else read)


def published_plan(run: Run) -> str:
    """Of a published plan: where it is, and how files are recorded there."""
    return _version("publish/1", [without_credentials(run.config.publish.url), RECORD_FORMAT])


def _version(code: str, settings: Any) -> str:
    """`grade/2+1a2b3c4d5e6f`: short, since the UI shows it beside each materialisation."""
    return f"{code}+{sha256_json(settings)[:12]}"
