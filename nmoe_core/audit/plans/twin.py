"""`nmoe twin`: writes the plan of a run over the same text in another tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loader.edits.twin import twin, uncompared
from loader.plan.records import LoaderPlan
from nmoe_core.audit.plans.placed import require_one_place
from nmoe_core.base.atomic import replacing, write_bytes
from nmoe_core.base.bucket.paths import shown


def write_twin(
    plan: LoaderPlan, sources: Mapping[str, Path], seq_len: int, output: Path
) -> dict[str, Any]:
    """Commit the twin of a plan. Returns `plan` (its path), `plan_id`, `sequences`, `steps` and
    `not_compared`: for these sources, only the numbers of documents were compared, not the texts.
    Raises as `loader.twin` and `require_one_place`."""
    output = output.absolute()
    require_one_place(output, plan.base, *sources.values())
    other = twin(plan, sources, seq_len).placed_in(output.parent)
    with replacing(output):
        write_bytes(output, other.to_json().encode())
    return {
        "plan": shown(output),
        "plan_id": other.plan_id,
        "sequences": other.num_sequences,
        "steps": other.num_sequences // other.batch_size,
        "not_compared": uncompared(other),
    }
