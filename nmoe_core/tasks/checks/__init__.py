"""Checks of each output of a run: functions that read committed files and return verdicts.

A verdict says whether the files are correct and, in one sentence, what was found. Checks do not
write or repair files. `LEVELS` has the level of each check, which `[checks]` of the run can change.
The level `block` is for failures that would pass wrong data to later assets.
"""

from nmoe_core.tasks.checks.attributes import ATTRIBUTE_CHECKS as ATTRIBUTE_CHECKS
from nmoe_core.tasks.checks.attributes import check_attribute as check_attribute
from nmoe_core.tasks.checks.attributes import check_attribute_of_all as check_attribute_of_all
from nmoe_core.tasks.checks.attributes import check_contamination as check_contamination
from nmoe_core.tasks.checks.hydra import check_backbone as check_backbone
from nmoe_core.tasks.checks.hydra import check_calibration as check_calibration
from nmoe_core.tasks.checks.hydra import check_grades as check_grades
from nmoe_core.tasks.checks.hydra import check_head as check_head
from nmoe_core.tasks.checks.hydra import check_labels as check_labels
from nmoe_core.tasks.checks.hydra import check_regrade as check_regrade
from nmoe_core.tasks.checks.hydra import check_slices as check_slices
from nmoe_core.tasks.checks.hydra import check_student as check_student
from nmoe_core.tasks.checks.hydra import grade_checks as grade_checks
from nmoe_core.tasks.checks.shards import CURATED_CHECKS as CURATED_CHECKS
from nmoe_core.tasks.checks.shards import MANIFEST_CHECKS as MANIFEST_CHECKS
from nmoe_core.tasks.checks.shards import check_curated as check_curated
from nmoe_core.tasks.checks.shards import check_curated_shards as check_curated_shards
from nmoe_core.tasks.checks.shards import check_leak as check_leak
from nmoe_core.tasks.checks.shards import check_manifest as check_manifest
from nmoe_core.tasks.checks.shards import check_plan as check_plan
from nmoe_core.tasks.checks.shards import check_seen as check_seen
from nmoe_core.tasks.checks.shards import check_shards as check_shards
from nmoe_core.tasks.checks.shards import check_topic_model as check_topic_model
from nmoe_core.tasks.checks.shards import check_topics as check_topics
from nmoe_core.tasks.checks.shards import plan_checks as plan_checks
from nmoe_core.tasks.checks.verdict import DESCRIPTIONS as DESCRIPTIONS
from nmoe_core.tasks.checks.verdict import LEVELS as LEVELS
from nmoe_core.tasks.checks.verdict import Level as Level
from nmoe_core.tasks.checks.verdict import Verdict as Verdict
from nmoe_core.tasks.checks.verdict import Verdicts as Verdicts
from nmoe_core.tasks.checks.verdict import level_of as level_of
