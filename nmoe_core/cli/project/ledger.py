"""The input ledger of a project: every file that `nmoe init` found, and its use.

Every file is taken, held out or left out, so the counts and bytes of these three add up to all
files found.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loader.files.format import read_json_object
from nmoe_core.base.atomic import write_json
from nmoe_core.config.run import Run
from nmoe_core.sources.discover import InputFile, relative
from nmoe_core.sources.storage import path_text

FORMAT = "nmoe-input-ledger-v1"
_MOST_NAMED = 3
_PARTS = {"train": "taken", "valid": "held_out", "test": "held_out", "left out": "left_out"}


def commit_ledger(run: Run, named: str, files: Sequence[InputFile]) -> dict[str, Any]:
    """Write the ledger of the files below `named`; return its totals and reasons."""
    totals = {part: {"files": 0, "size_bytes": 0} for part in ("seen", *_PARTS.values())}
    rows: list[dict[str, Any]] = []
    reasons: dict[str, dict[str, Any]] = {}
    for file in files:
        name = path_text(Path(relative(file.path, run.base)))
        added = [totals["seen"], totals[_PARTS[file.use]]]
        if file.use != "train":
            empty = {"reason": file.reason, "files": 0, "size_bytes": 0, "such_as": []}
            why = reasons.setdefault(file.reason, empty)
            why["such_as"] += [name] * (len(why["such_as"]) < _MOST_NAMED)
            added.append(why)
        for counts in added:
            counts["files"] += 1
            counts["size_bytes"] += file.size_bytes
        source = file.source if file.use in ("train", "valid") else None
        row = {"path": name, "size_bytes": file.size_bytes, "use": file.use, "source": source}
        rows.append(row | {"reason": file.reason or None})
    path = run.tree.input_ledger
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"format": FORMAT, "named": named, **totals, "files": rows})
    return {"ledger": str(path.absolute()), **totals, "not_taken": list(reasons.values())}


def last_ledger(run: Run) -> dict[str, Any]:
    """Read the ledger; empty if it does not exist."""
    path = run.tree.input_ledger
    return read_json_object(path) if path.is_file() else {"named": ".", "files": []}
