"""Head files: `hydra_probe.safetensors` and `hydra_judge.safetensors`.

The one metadata entry `nmoe` is a JSON header that says what the head was made from. Equal weights
and header give equal bytes. A head is loaded only for the backbone it was trained on; pickles are
refused, because reading one runs whatever code it holds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from loader.files.sealed import check_seal, sealed
from nmoe_core.base.atomic import write_bytes
from nmoe_core.base.errors import HeadError
from nmoe_core.base.fingerprint import sha256_file, sha256_json
from nmoe_core.config.tree import JUDGE_NAME, PROBE_NAME
from nmoe_core.engine.weights.config import tap_layers
from nmoe_core.heads.features import Backbone
from nmoe_core.heads.models import Judge, Probe, arch_from_dict, head_of
from nmoe_core.sources.digests import local_digest

HEAD_FORMAT = "hydra-head/2"
# Heads of older versions, whose header carries no hashes.
UNSEALED_FORMATS = ("hydra-head/1",)
HEADER_KEY = "nmoe"
CONTENTS_KEY = "train_contents"
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
Header = dict[str, Any]


def save_head(
    path: Path,
    head: Probe | Judge,
    header: Mapping[str, Any],
    train_contents: np.ndarray | None = None,
) -> str:
    """Commit a head; return the SHA-256 of its file.

    Args:
        path: A `.safetensors` file.
        head: The trained module.
        header: What it was made from; `format`, and `arch` from the head, are added.
        train_contents: Digests of the documents it was fitted on, int64, for leak checks.
    """
    tensors = {
        name: value.detach().to("cpu", torch.float32).contiguous()
        for name, value in head.state_dict().items()
    }
    if train_contents is not None:
        tensors[CONTENTS_KEY] = torch.from_numpy(np.unique(train_contents))
    made = {"format": HEAD_FORMAT, "arch": head.arch.as_dict(), **header}
    full = sealed(made | {"tensors_sha256": tensors_digest(tensors)})
    text = json.dumps(full, ensure_ascii=False, allow_nan=False)
    write_bytes(path, save(tensors, metadata={HEADER_KEY: text}))
    return sha256_file(path)


def read_header(path: Path) -> Header:
    """The JSON header of a head file, without its weights.

    Raises:
        HeadError: Missing (E-HEAD-MISSING), a pickle (E-HEAD-PICKLE), not a head file of a format
            known here (E-HEAD-FORMAT), or edited (E-HEAD-CHANGED).
    """
    return _read(path, with_weights=False)[0]


def read_head(path: Path) -> tuple[Header, dict[str, Tensor]]:
    """Header and tensors of a head file, which must be those that were written.

    Raises:
        HeadError: As `read_header`; or the tensors were changed (E-HEAD-CHANGED).
    """
    header, tensors = _read(path, with_weights=True)
    expected = header.get("tensors_sha256")  # headers of older versions have none
    if expected is not None and (found := tensors_digest(tensors)) != expected:
        raise HeadError(
            "the head's weights are not those that were trained",
            where=path,
            found=found,
            expected=expected,
            do="restore the file, or train the head again",
            code="E-HEAD-CHANGED",
        )
    return header, tensors


def _read(path: Path, with_weights: bool) -> tuple[Header, dict[str, Tensor]]:
    _require_safe(path)
    try:
        with safe_open(str(path), framework="pt") as file:
            header = json.loads((file.metadata() or {})[HEADER_KEY])
            names = list(file.keys()) if with_weights else []
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, KeyError, ValueError, RecursionError) as error:
        found = " ".join(f"{type(error).__name__}: {error}".split())
        raise _bad_format(path, found[:200]) from None
    if not isinstance(header, dict) or header.get("format") not in (HEAD_FORMAT, *UNSEALED_FORMATS):
        raise _bad_format(path, repr(header)[:80])
    check_seal(
        header,
        path,
        required=header["format"] == HEAD_FORMAT,
        code="E-HEAD-CHANGED",
        error=HeadError,
        do="it was edited or damaged: restore it, or train the head again",
    )
    return header, tensors


def load_head(path: Path, backbone: Backbone, max_ctx: int) -> tuple[Probe | Judge, Header]:
    """Load a head for use on a backbone.

    Args:
        path: The head's file.
        backbone: The model whose states the head will read.
        max_ctx: Tokens of a document that the head will see.

    Returns:
        The module in evaluation mode on the backbone's device, and the file's header.

    Raises:
        HeadError: As `read_head`; its tensors are not those of its shape (E-HEAD-FORMAT) or not
            finite (E-HEAD-NONFINITE); it was trained on another backbone (E-HEAD-BACKBONE) or on
            another number of tokens (E-HEAD-CONTEXT).
    """
    return _load(path, backbone, max_ctx)[:2]


def _load(path: Path, backbone: Backbone, max_ctx: int) -> tuple[Probe | Judge, Header, np.ndarray]:
    """The head, its header, and the digests of the documents that it was fitted on."""
    header, tensors = read_head(path)
    named = header.get("backbone")
    trained_on = named.get("digest") if isinstance(named, dict) else None
    if trained_on != backbone.digest:
        raise HeadError(
            "head was trained on another backbone",
            where=path,
            found=f"backbone {backbone.digest}",
            expected=trained_on,
            do="train the heads again on this backbone",
            code="E-HEAD-BACKBONE",
        )
    if header.get("max_ctx") != max_ctx:
        raise HeadError(
            "the head was trained on another number of tokens per document",
            where=path,
            found=f"max_ctx {max_ctx} asked for",
            expected=f"{header.get('max_ctx')} as in training",
            do="use the same max_ctx, or train the heads again",
            code="E-HEAD-CONTEXT",
        )
    contents = tensors.pop(CONTENTS_KEY, torch.empty(0, dtype=torch.int64))
    if contents.dtype != torch.int64 or contents.dim() != 1:
        raise _bad_format(path, f"{CONTENTS_KEY} {contents.dtype} {list(contents.shape)}")
    try:
        head = head_of(arch_from_dict(header["arch"]), tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise _bad_format(path, " ".join(str(error).split())[:200]) from None
    bad = sorted(name for name, value in tensors.items() if not torch.isfinite(value).all())
    if bad:
        raise HeadError("weights are not finite", where=path, found=bad[0], code="E-HEAD-NONFINITE")
    head = head.to(next(iter(backbone.parameters())).device).eval()
    return head, header, contents.numpy()


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the names, shapes and bytes of tensors."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _require_safe(path: Path) -> None:
    """Refuse a missing file, and a pickle in its place or beside it."""
    # Sorted so that `hydra_probe_phase_c.pt` comes before `hydra_probe.pt`, as in their own tool.
    pickles = sorted(path.parent.glob(f"{path.stem}*.pt"), reverse=True)
    if path.is_file():
        with open(path, "rb") as file:
            pickles = [path] if file.read(4).startswith(_PICKLE_STARTS) else []
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


def _bad_format(path: Path, found: str) -> HeadError:
    return HeadError(
        "not a head file",
        where=path,
        found=found,
        expected=f"a {HEAD_FORMAT} file whose tensors have the shapes of its header",
        do="train the head again",
        code="E-HEAD-FORMAT",
    )


@dataclass(frozen=True, slots=True)
class Heads:
    """Probe and judge of one directory, with the digests of their files.

    `probe_tap` and `judge_tap` are the numbers of the blocks whose states they read;
    `train_contents` the digests of the documents they were fitted on (int64, sorted; see
    `DocumentTokens.digests`), empty where that is not known.
    """

    probe: Probe
    judge: Judge
    probe_digest: str
    judge_digest: str
    scorer_model: str
    max_ctx: int
    probe_tap: int
    judge_tap: int
    train_contents: np.ndarray

    @property
    def digest(self) -> str:
        """One digest of both files."""
        return heads_digest(self.probe_digest, self.judge_digest)


def heads_digest(probe_digest: str, judge_digest: str) -> str:
    """The digest that stands for a pair of head files."""
    return sha256_json({"probe": probe_digest, "judge": judge_digest})


def load_heads(heads_dir: Path, backbone: Backbone, max_ctx: int) -> Heads:
    """Load both heads of a directory for a backbone.

    Raises:
        HeadError: As `load_head`, for either file; or the files are not a probe and a judge that
            reads no earlier block (E-HEAD-FORMAT).
    """
    paths = heads_dir / PROBE_NAME, heads_dir / JUDGE_NAME
    (probe, header, seen), (judge, judge_header, judge_seen) = (
        _load(path, backbone, max_ctx) for path in paths
    )
    if not isinstance(probe, Probe) or not isinstance(judge, Judge):
        raise _bad_format(heads_dir, f"{type(probe).__name__} and {type(judge).__name__}")
    taps = tuple(tap_of(p, h, backbone) for p, h in zip(paths, (header, judge_header)))
    if taps[0] > taps[1]:
        raise _bad_format(heads_dir, f"the probe reads block {taps[0]}, the judge {taps[1]}")
    return Heads(
        probe=probe,
        judge=judge,
        probe_digest=local_digest(paths[0]),
        judge_digest=local_digest(paths[1]),
        scorer_model=str(header.get("scorer_model", "")),
        max_ctx=max_ctx,
        probe_tap=taps[0],
        judge_tap=taps[1],
        train_contents=np.unique(np.concatenate([seen, judge_seen])),
    )


def tap_of(path: Path, header: Header, backbone: Backbone) -> int:
    """Number of the block that a head reads; the usual one of its kind where the header has none.

    Raises:
        HeadError: The backbone has no such block (E-HEAD-FORMAT).
    """
    depth = backbone.config.num_hidden_layers
    tap = header.get("tap") or tap_layers(depth)[header["arch"]["kind"] == "judge"]
    if type(tap) is not int or not 1 <= tap <= depth:
        raise _bad_format(path, f"tap {tap!r} of {depth} blocks"[:80])
    return tap
