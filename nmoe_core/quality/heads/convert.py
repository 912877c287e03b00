"""Converts pickled head weights of the two published forms (docs/hydra.md has their tensors).

torch's weights-only reader loads the pickle, so no code in the file runs. An archive with
compressed members is refused, because torch writes no such archives. A file of the second form
holds its tensors in one dictionary, or in one dictionary per part.
"""

import pickle
import struct
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from loader.files.regular import regular
from nmoe_core.base.atomic import replacing
from nmoe_core.base.errors import HeadError
from nmoe_core.config.tree import JUDGE_NAME, PROBE_NAME
from nmoe_core.engine import Transformer
from nmoe_core.labels.oracle import Scorer
from nmoe_core.labels.scores import QUALITY
from nmoe_core.quality.heads.head_files import header_of, save_head
from nmoe_core.quality.heads.models import Probe, head_of
from nmoe_core.quality.heads.shapes import JudgeArch, ProbeArch, tap_of

UNKNOWN = "unknown"
# Raised by torch when it reads bytes that are not a pickle.
_DAMAGED = (
    *(pickle.UnpicklingError, EOFError, RuntimeError, ValueError, TypeError, LookupError),
    *(AttributeError, ArithmeticError, AssertionError, struct.error, OSError, MemoryError),
    *(zipfile.BadZipFile, NotImplementedError),
)
_FORMS = "a probe (proj, or gate) or a judge (q0, proj, enc0... or q_token, projector, encoder...)"
_SECOND_FORM = {"projector": "proj", "encoder": "enc0", "rubric_head": "shared_head"}


def import_pickle(
    path: Path, heads_dir: Path, model: Transformer, max_ctx: int, num_heads: int = 8
) -> Path:
    """Write the head of a pickle as `heads_dir/hydra_{probe,judge}.safetensors`; return its path.

    A pickle does not record the backbone, the tokens per document or the number of attention heads
    of a judge, so the caller gives them. Raises HeadError if the file is missing (E-HEAD-MISSING)
    or does not hold the tensors of a probe or judge for this backbone (E-HEAD-FORMAT).
    """
    tensors = _read_tensors(path)
    try:
        tensors, arch = _known_form(tensors, num_heads)
        head = head_of(arch, tensors)
    except (LookupError, ValueError, RuntimeError) as error:
        raise _not_a_head(path, str(error)) from None
    if arch.hidden_size != model.config.hidden_size:
        raise _not_a_head(path, f"hidden size {arch.hidden_size}", f"{model.config.hidden_size}")
    target = heads_dir / (PROBE_NAME if isinstance(head, Probe) else JUDGE_NAME)
    unknown = Scorer(UNKNOWN, UNKNOWN, UNKNOWN)
    header = header_of(model, tap_of(head.kind, model), max_ctx, UNKNOWN, unknown)
    more = {"imported_from": path.name, "metrics": {}, "fingerprints": {}}
    with replacing(target):
        save_head(target, head, header | more)
    return target


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        if zipfile.is_zipfile(
            regular(path)
        ):  # torch unpacks members that were compressed a thousand times
            with zipfile.ZipFile(regular(path)) as archive:
                size_bytes = sum(member.file_size for member in archive.infolist())
            if size_bytes > path.stat().st_size:
                raise ValueError(
                    f"members of {size_bytes} bytes in a file of {path.stat().st_size}"
                )
        value = torch.load(regular(path), map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise HeadError("head is missing", where=path, code="E-HEAD-MISSING") from None
    except _DAMAGED as error:
        raise _not_a_head(path, str(error)) from None
    if not isinstance(value, dict):
        raise _not_a_head(path, type(value).__name__)
    flat: dict[str, Tensor] = {}
    for name, item in value.items():
        within = item if isinstance(item, dict) else {"": item}
        flat |= {f"{name}.{key}".rstrip("."): tensor for key, tensor in within.items()}
    for name, item in flat.items():
        if not isinstance(item, Tensor):
            raise _not_a_head(path, f"{name}, a {type(item).__name__}")
    return flat


def _known_form(
    tensors: dict[str, Tensor], num_heads: int
) -> tuple[dict[str, Tensor], ProbeArch | JudgeArch]:
    """The tensors, renamed to this project's names, and the shape of the head."""
    if "gate.weight" in tensors:
        # The gate gives one score. It is converted to five equal scores, whose aggregate equals
        # this score for any weights.
        weight = tensors["gate.weight"]
        bias = tensors["gate.bias"]
        if weight.shape[0] != 1:
            raise ValueError(f"gate.weight of shape {tuple(weight.shape)}")
        repeated = {
            f"proj.{name}": QUALITY.highest[0]
            * value.float().repeat(len(QUALITY), *[1] * (value.dim() - 1))
            for name, value in (("weight", weight), ("bias", bias))
        }
        return repeated, ProbeArch(weight.shape[1], is_normalised=False)
    has_second_pass = not any(name.startswith("rubric_head.") for name in tensors)
    if not has_second_pass:
        tensors = {_first_name(name): value for name, value in tensors.items()}
    rows, hidden_size = tensors["proj.weight"].shape
    if has_second_pass and "q0" not in tensors:
        return tensors, ProbeArch(hidden_size, nan_to_num=True)
    sizes = hidden_size, rows, num_heads, tensors["enc0.linear1.weight"].shape[0]
    return tensors, JudgeArch(*sizes, nan_to_num=True, has_second_pass=has_second_pass)


def _first_name(name: str) -> str:
    """Translate a tensor's name from the second published form to the first."""
    if name in ("q_token", "encoder.q_token"):
        return "q0"
    part, _, rest = name.partition(".")
    return f"{_SECOND_FORM.get(part, part)}.{rest}"


def _not_a_head(path: Path, found: str, expected: str = _FORMS) -> HeadError:
    return HeadError(
        "not a head of a published form",
        where=path,
        found=" ".join(found.split())[:200],
        expected=expected,
        code="E-HEAD-FORMAT",
    )
