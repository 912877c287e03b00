"""What each output of a run is held to: functions that read committed files and give verdicts.

A verdict says whether the files are what they claim and what was found, in one sentence. Nothing is
repaired or written. `LEVELS` says how much a failed check matters unless the run's `[checks]`
says otherwise: `block` is for what would put wrong data downstream.
"""

from nmoe_core.tasks.checks.hydra import (
    check_backbone,
    check_calibration,
    check_grades,
    check_head,
    check_labels,
    check_regrade,
    check_slices,
)
from nmoe_core.tasks.checks.shards import (
    CURATED_CHECKS,
    MANIFEST_CHECKS,
    check_curated,
    check_curated_shards,
    check_leak,
    check_manifest,
    check_plan,
    check_shards,
    check_topic_model,
    check_topics,
)
from nmoe_core.tasks.checks.verdict import DESCRIPTIONS, LEVELS, Level, Verdict, Verdicts, level_of

__all__ = [
    "CURATED_CHECKS",
    "DESCRIPTIONS",
    "LEVELS",
    "MANIFEST_CHECKS",
    "Level",
    "Verdict",
    "Verdicts",
    "check_backbone",
    "check_calibration",
    "check_curated",
    "check_curated_shards",
    "check_grades",
    "check_head",
    "check_labels",
    "check_leak",
    "check_manifest",
    "check_plan",
    "check_regrade",
    "check_shards",
    "check_slices",
    "check_topic_model",
    "check_topics",
    "level_of",
]
