"""Head files: `hydra_probe.safetensors` and `hydra_judge.safetensors`.

Head files are read and written as arrays, without torch. Their only metadata entry, `nmoe`, is a
JSON header that names the inputs of the head. Equal weights and an equal header give equal bytes. A
head is only loaded for the backbone on which it was trained. Pickles are refused, because reading a
pickle can run code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from loader.files.checksummed_json import check_seal, sealed
from loader.files.nested import json_value
from loader.files.regular import open_file, read_file, regular
from nmoe_core.base.atomic import TMP_MARK, replacing, write_bytes
from nmoe_core.base.bucket.paths import shown
from nmoe_core.base.errors import HeadError
from nmoe_core.base.fingerprint import Fingerprints, sha256_file, sha256_json
from nmoe_core.base.result import Result
from nmoe_core.labels.oracle import Scorer
from nmoe_core.labels.scores import Scale
from nmoe_core.quality.heads.metrics import head_card
from nmoe_core.quality.heads.shapes import arch_from_dict, arch_to_dict

if TYPE_CHECKING:
    from nmoe_core.engine import Transformer
    from nmoe_core.quality.heads.models import Judge, Probe

HEAD_FORMAT = "hydra-head/2"
# Older formats, whose header holds no hashes.
UNSEALED_FORMATS = ("hydra-head/1",)
HEADER_KEY = "nmoe"
CONTENTS_KEY = "train_contents"
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
Header = dict[str, Any]
Arrays = dict[str, np.ndarray]


def write_tensors(
    path: Path, tensors: Mapping[str, np.ndarray], key: str, header: Header, has_card: bool = False
) -> str:
    """Write tensors, with their digest and the checksummed header in the metadata entry `key`;
    return the file's SHA-256. The card is written before the head, so every current head has a
    card."""
    stored = {name: np.require(value, requirements="C") for name, value in tensors.items()}
    full = sealed(header | {"tensors_sha256": tensors_digest(stored)})
    text = json.dumps(full, ensure_ascii=False, allow_nan=False)
    payload = save(stored, metadata={key: text})
    digest = hashlib.sha256(payload).hexdigest()
    if has_card:
        write_bytes(path.with_suffix(".md"), head_card(path.name, digest, header).encode())
    write_bytes(path, payload)
    return digest


def read_tensors(path: Path, key: str, with_weights: bool = True) -> tuple[Any, Arrays]:
    """Read the header and tensors that `write_tensors` wrote, without checking them; if
    `with_weights` is false, tensors are not read. Raises OSError, SafetensorError, KeyError,
    TypeError or ValueError if `write_tensors` did not write the file.
    """
    with safe_open(regular(str(path)), framework="np") as file:
        header = json_value((file.metadata() or {})[key])
        names = list(file.keys()) if with_weights else []
        return header, {name: file.get_tensor(name) for name in names}


def tensors_digest(tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over the names, dtypes (as torch names them), shapes and bytes of contiguous
    arrays."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} torch.{value.dtype} {value.shape} ".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def save_head(
    path: Path,
    head: Probe | Judge,
    header: Mapping[str, Any],
    train_contents: np.ndarray | None = None,
    has_card: bool = False,
) -> str:
    """Write a head with a header that names its inputs; return the file's SHA-256.

    `train_contents` are the digests of the training documents, int64, for leak checks.
    """
    state = head.state_dict()
    tensors = {name: value.detach().float().cpu().numpy() for name, value in state.items()}
    if train_contents is not None:
        tensors[CONTENTS_KEY] = np.unique(train_contents)
    arch = {"kind": head.kind, **arch_to_dict(head.arch)}
    full = {"format": HEAD_FORMAT, "arch": arch, **header}
    return write_tensors(path, tensors, HEADER_KEY, full, has_card)


def header_of(
    model: Transformer, tap: int | list[int], max_ctx: int, labels_digest: str, scorer: Scorer
) -> Header:
    """The header fields that name the inputs of a head."""
    config = model.config
    return {
        "tap": tap,
        "max_ctx": max_ctx,
        "backbone": {
            "digest": model.digest,
            "num_hidden_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
        },
        "labels_digest": labels_digest,
        **scorer._asdict(),
    }


def read_header(path: Path) -> Header:
    """Read the JSON header of a head file, without the weights. Raises HeadError if the file is
    missing (E-HEAD-MISSING), a pickle (E-HEAD-PICKLE), not a head file of a known format
    (E-HEAD-FORMAT), or was edited (E-HEAD-CHANGED)."""
    return _read(path, with_weights=False)[0]


def read_head(path: Path) -> tuple[Header, Arrays]:
    """Read the header and tensors of a head file. Raises HeadError as `read_header`, and if the
    tensors were changed (E-HEAD-CHANGED)."""
    header, tensors = _read(path, with_weights=True)
    expected = header.get("tensors_sha256")  # older formats lack this field
    if expected is not None and (found := tensors_digest(tensors)) != expected:
        raise HeadError(
            "the head's weights were changed after training",
            where=path,
            found=found,
            expected=expected,
            do="restore the file, or train the head again",
            code="E-HEAD-CHANGED",
        )
    return header, tensors


def _read(path: Path, with_weights: bool) -> tuple[Header, Arrays]:
    _require_safe(path)
    try:
        header, tensors = read_tensors(path, HEADER_KEY, with_weights)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise bad_format(path, f"{type(error).__name__}: {error}") from None
    if not isinstance(header, dict) or header.get("format") not in (HEAD_FORMAT, *UNSEALED_FORMATS):
        raise bad_format(path, repr(header)[:80])
    check_seal(
        header,
        path,
        required=header["format"] == HEAD_FORMAT,
        code="E-HEAD-CHANGED",
        error=HeadError,
        do="the file was edited or damaged: restore it, or train the head again",
    )
    return header, tensors


def _require_safe(path: Path) -> None:
    """Raise HeadError if the file is missing, or if this file or a file beside it is a pickle."""
    # Sorted so that `hydra_probe_phase_c.pt` comes before `hydra_probe.pt`, as in the published
    # tool.
    pickles = sorted(path.parent.glob(f"{path.stem}*.pt"), reverse=True)
    if path.is_file():
        with open_file(path) as file:
            start = file.read(9)
        # A safetensors file with a header of 640 bytes begins with the same bytes as a pickle, but
        # its JSON header begins at byte 8.
        pickles = [path] if start.startswith(_PICKLE_STARTS) and start[8:] != b"{" else []
    if pickles:
        raise HeadError(
            "head is a pickle, which can run code when it is read",
            where=pickles[0],
            expected="a .safetensors file",
            do="convert it once: nmoe train import-pt",
            code="E-HEAD-PICKLE",
        )
    if not path.is_file():
        raise HeadError(
            "head is missing",
            where=path,
            do="train it: nmoe train probe, nmoe train judge",
            code="E-HEAD-MISSING",
        )


def current_header(path: Path, fingerprints: Fingerprints) -> Header | None:
    """The header of a head that was made from these inputs and is unchanged, else None. Also
    removes leftovers of a killed training and restores the head's card."""
    if not path.is_file():
        return None
    try:
        header, _ = read_head(path)
    except HeadError as error:
        if error.code != "E-HEAD-CHANGED":
            raise
        return None
    if header.get("fingerprints") != fingerprints:
        return None
    card = path.with_suffix(".md")
    text = head_card(path.name, sha256_file(path), header).encode()
    is_own = card.is_file() and read_file(card) == text
    if not is_own or any(path.parent.glob(f"*{path.stem}.*{TMP_MARK}*")):
        with replacing(path, card, training_state(path)):
            write_bytes(card, text)
    return header


def training_state(path: Path) -> Path:
    """The file that holds the state of an unfinished training of the head at `path`."""
    return path.with_name(f".{path.stem}.training.safetensors")


def result_of(path: Path, header: Header, **more: int) -> Result:
    """The result of a training: agreement on val, `labels`, `path`, and `more`."""
    metrics = header["metrics"]
    facts = {
        **{key: value for key, value in metrics.items() if isinstance(value, int | float)},
        "labels": header["training"]["num_documents"],
        **more,
        "path": shown(path),
    }
    return Result(sha256_file(path), facts)


def bad_format(path: Path, found: str) -> HeadError:
    return HeadError(
        "the file is not a head file",
        where=path,
        found=" ".join(found.split())[:200],
        expected=f"a {HEAD_FORMAT} file whose tensors have the shapes of its header",
        do="train the head again",
        code="E-HEAD-FORMAT",
    )


def scale_of_head(path: Path, header: Header, num_scores: int) -> Scale:
    """The scale of a head's scores. Raises HeadError if the header names no scale, or the scale has
    another number of scores (E-HEAD-FORMAT)."""
    try:
        scale = Scale.read(header.get("scale"))
    except ValueError as error:
        raise bad_format(path, str(error)) from None
    if len(scale) != num_scores:
        raise bad_format(path, f"{num_scores} scores, a scale of {len(scale)}")
    return scale


class LoadedHead(NamedTuple):
    """A head in evaluation mode, the header of its file, the digests of its training documents, and
    the scale of its scores."""

    head: Probe | Judge
    header: Header
    train_contents: np.ndarray
    scale: Scale


def context_of(path: Path) -> int:
    """The number of tokens per document on which a head was trained. Raises HeadError as
    `read_header`."""
    max_ctx = read_header(path).get("max_ctx")
    if type(max_ctx) is not int or max_ctx < 1:
        raise bad_format(path, f"max_ctx {max_ctx!r}"[:80])
    return max_ctx


def load_head(path: Path, model: Transformer, max_ctx: int) -> LoadedHead:
    """Load a head onto the device of its backbone, to read `max_ctx` tokens per document. Raises
    HeadError as `read_head`, and if the tensors do not fit the header's shape (E-HEAD-FORMAT) or
    are not finite (E-HEAD-NONFINITE), or if the head was trained on another backbone
    (E-HEAD-BACKBONE) or with another `max_ctx` (E-HEAD-CONTEXT)."""
    import torch

    from nmoe_core.quality.heads.features import device_of
    from nmoe_core.quality.heads.models import head_of

    header, arrays = read_head(path)
    named = header.get("backbone")
    trained_on = named.get("digest") if isinstance(named, dict) else None
    if trained_on != model.digest:
        raise HeadError(
            "head was trained on another backbone",
            where=path,
            found=f"backbone {model.digest}",
            expected=trained_on,
            do="train the heads again on this backbone",
            code="E-HEAD-BACKBONE",
        )
    if header.get("max_ctx") != max_ctx:
        raise HeadError(
            "the head was trained on another number of tokens per document",
            where=path,
            found=f"max_ctx {max_ctx} requested",
            expected=f"max_ctx {header.get('max_ctx')}, as in training",
            do="use the same max_ctx, or train the heads again",
            code="E-HEAD-CONTEXT",
        )
    contents = arrays.pop(CONTENTS_KEY, np.empty(0, np.int64))
    if contents.dtype != np.int64 or contents.ndim != 1:
        raise bad_format(path, f"{CONTENTS_KEY} {contents.dtype} {list(contents.shape)}")
    try:
        tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
        head = head_of(arch_from_dict(header["arch"]), tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise bad_format(path, str(error)) from None
    bad = sorted(name for name, value in arrays.items() if not np.isfinite(value).all())
    if bad:
        raise HeadError("weights are not finite", where=path, found=bad[0], code="E-HEAD-NONFINITE")
    scale = scale_of_head(path, header, head.arch.num_scores)
    return LoadedHead(head.to(device_of(model)).eval(), header, contents, scale)


def heads_digest(probe_digest: str, judge_digest: str) -> str:
    """The digest of a pair of head files."""
    return sha256_json({"probe": probe_digest, "judge": judge_digest})


def stacked_digest(heads: str, student: str, probe_weight: float) -> str:
    """The digest of student and probe that grade together; `heads` is the `heads_digest`."""
    return sha256_json({"heads": heads, "student": student, "probe_weight": probe_weight})
