"""Masks documents, so that training no longer learns their text, for example after a takedown."""

import os
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from loader.files.format import resolve_inside
from loader.plan.check import check_plan
from loader.plan.records import LoaderPlan, MaskedTokens
from loader.plan.tables import unknown_name
from loader.rows.stream import Stream


def mask(
    plan: LoaderPlan, tokens: Iterable[tuple[str, str | Path, int, int]], replace_text: bool = False
) -> LoaderPlan:
    """The plan with additional masked tokens, which are never targets. `tokens`: source, token
    file, start and end of each document, as from `loader.rows.origins`. The file is a path, or its
    name in the manifest.

    Order and windows stay the same, so a state of the old plan loads under the new plan, and the
    reverse. Masked targets are -100, and with `replace_text` the inputs are EOS, so that the model
    does not read the text as context either. Raises ConfigError if a source is not in the plan, and
    PlanError if the tokens do not exist (E-PLAN-FORMAT).
    """
    places = {s.name: resolve_inside(plan.base, s.manifest) for s in plan.sources}
    masked = {*plan.masked}
    for source, file, start, end in tokens:
        if source not in places:
            raise unknown_name("source", source, places, f"{plan.plan_id}: masked")
        place = places[source] if places[source].is_dir() else places[source].parent
        name = Path(os.path.relpath(place / file, place)).as_posix()
        masked.add(MaskedTokens(source, name, int(start), int(end), replace_text))
    after = replace(plan, masked=tuple(sorted(masked)))
    check_plan(after)
    with closing(Stream(after, "train")):
        return after
