"""Cache of the labelled documents' scores, so that a calibration with new targets runs no grader.

The file is beside the calibration. If it is missing, damaged or made from other inputs, the
documents are scored again.
"""

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from loader.files.regular import regular
from nmoe_core.base.atomic import write_bytes
from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.labels.scores import Scale
from nmoe_core.quality.calibration.choice import Candidate
from nmoe_core.quality.calibration.rows import CalibrationRows

KEPT_NAME = ".scores.npz"
_SPLITS = ("val", "test")


def keep_scores(path: Path, made_from: Fingerprints, candidates: Sequence[Candidate]) -> None:
    """Write the scores of each grader to the cache; equal arguments give equal bytes."""
    arrays: dict[str, np.ndarray] = {}
    plain: dict[str, dict[str, Any]] = {}
    for number, candidate in enumerate(candidates):
        for split, rows in zip(_SPLITS, candidate):
            if rows is None:
                continue
            name = f"{number}.{split}"
            plain[name] = {"scale": rows.scale.in_file()}
            for field in fields(rows):
                value = getattr(rows, field.name)
                if isinstance(value, np.ndarray):
                    arrays[f"{name}.{field.name}"] = value
                elif field.name != "scale":
                    plain[name][field.name] = value
    header = {"made_from": made_from, "rows": plain}
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    payload = io.BytesIO()
    np.savez(payload, **arrays)  # pyright: ignore[reportArgumentType]
    write_bytes(path, payload.getvalue())


def recall_scores(path: Path, made_from: Fingerprints) -> list[Candidate] | None:
    """The cached scores for these inputs; None if the cache does not hold them."""
    try:
        with np.load(regular(path), allow_pickle=False) as file:
            header = json.loads(file["header"].tobytes())
            if header["made_from"] != made_from:
                return None
            rows = {name: _rows(file, name, plain) for name, plain in header["rows"].items()}
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
    numbers = sorted({name.partition(".")[0] for name in rows}, key=int)
    return [(rows[f"{number}.val"], rows.get(f"{number}.test")) for number in numbers]


def _rows(file: Any, name: str, plain: dict[str, Any]) -> CalibrationRows:
    scale = Scale.read(plain.pop("scale").get("scale"))
    known = {field.name for field in fields(CalibrationRows)}
    arrays = {key: file[f"{name}.{key}"] for key in known if f"{name}.{key}" in file.files}
    return CalibrationRows(**arrays, **plain, scale=scale)
