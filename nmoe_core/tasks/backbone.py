"""The backbone and other checkpoints of a run. torch is imported when a model is loaded."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loader.files.format import MANIFEST_NAME, read_json_object
from nmoe_core.base.bucket.paths import shown
from nmoe_core.base.errors import CheckpointError
from nmoe_core.base.result import Result
from nmoe_core.base.settings import ExpertChoice
from nmoe_core.config.cache import checkpoint_dir, fetched_name
from nmoe_core.config.run import Run
from nmoe_core.engine.weights.families import RECIPE_KEY
from nmoe_core.text.models import ModelIds, model_ids
from nmoe_core.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from nmoe_core.engine import Transformer
    from nmoe_core.quality.heads.scoring import HeadScorer
    from nmoe_core.quality.kept_states import KeptStates, Workers

_TINY_LAYERS = 4  # few blocks suffice: with random weights, more blocks do not improve a head


def backbone_kind(run: Run) -> str:
    """`tiny` for random weights (made by the run or by `nmoe make-tiny-checkpoint`), else
    `checkpoint`."""
    path = run.tree.checkpoint / "config.json"
    is_random = path.is_file() and RECIPE_KEY in read_json_object(path)
    return "tiny" if is_random else run.config.backbone.kind


def make_backbone(run: Run) -> Result:
    """Make the tiny checkpoint if the run has `kind = "tiny"`, or fetch a named one; return the
    checkpoint's digest. Raises CheckpointError if the checkpoint is missing or unreadable."""
    from nmoe_core.engine.weights.checkpoint import open_checkpoint
    from nmoe_core.engine.weights.tiny import make_tiny_checkpoint
    from nmoe_core.engine.weights.weight_files import checkpoint_digest

    table = run.config.backbone
    path = run.tree.checkpoint
    if table.kind == "tiny":
        make_tiny_checkpoint(path, family=table.family, seed=table.seed, num_layers=_TINY_LAYERS)
    require_checkpoint(path)
    with open_checkpoint(path) as checkpoint:
        config = checkpoint.config
    is_tiny = backbone_kind(run) == "tiny"
    facts = {
        "kind": "tiny: seeded random weights, a placeholder" if is_tiny else "checkpoint",
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "experts": config.num_experts,
        "path": shown(path),
    }
    return Result(checkpoint_digest(path), facts)


def tiny_recipe(run: Run) -> dict[str, Any]:
    """The `config.json` that `make_backbone` writes for a run of kind `tiny`."""
    from nmoe_core.engine.weights.tiny_config import tiny_config

    table = run.config.backbone
    return tiny_config(table.family, table.seed, _TINY_LAYERS)


def ids_for_model(run: Run) -> ModelIds | None:
    """A converter from the run's token ids to the backbone's token ids; None if both use the same
    ids.

    Raises:
        CheckpointError: The checkpoint or its embedding table is missing.
        TokenizerError: The tokenizer of the run or of the checkpoint cannot be used, or the
            checkpoint has no tokenizer (E-TOKENIZER-NAME); see `model_ids`.
        HeadError: The tokenizer in the flags of a run without a file differs from the shards'
            (E-HEAD-TOKENIZER).
    """
    path = run.tree.checkpoint
    require_checkpoint(path)
    from nmoe_core.curate.topics.embed import table_shape

    is_random = backbone_kind(run) == "tiny"
    if not is_random and not run.has_file:  # flags may name another tokenizer than the shards have
        from nmoe_core.quality.heads.student_file import require_tokenizer

        data = run.tree.data
        sources = sorted(found.parts[-3] for found in data.glob(f"*/train/{MANIFEST_NAME}"))
        require_tokenizer(data, sources, load_tokenizer(run.tokenizer))
    return model_ids(run.tokenizer, path, table_shape(path)[0], is_random=is_random)


def load_backbone(run: Run) -> Transformer:
    """Load the run's backbone, once per process. Raises CheckpointError if the checkpoint is
    missing (E-CHECKPOINT-MISSING) or unreadable."""
    from nmoe_core.engine.weights.weight_files import checkpoint_digest

    table = run.config.backbone
    path = run.tree.checkpoint
    require_checkpoint(path)
    return _loaded(path, checkpoint_digest(path), table.device, table.dtype, table.moe_backend)


def found_states(run: Run, scorer: HeadScorer) -> KeptStates | None:
    """States that the training kept; None if a document's states depend on its batch, as grades
    must not depend on what is kept."""
    from nmoe_core.quality.heads.features import is_batch_invariant

    is_used = is_batch_invariant(scorer.model)
    return kept_states(run, scorer.heads.probe_taps) if is_used else None


def kept_states(run: Run, blocks: Sequence[int] = ()) -> KeptStates:
    """The store of the training's pooled states, if it keeps those of `blocks` too."""
    from nmoe_core.quality.heads.shapes import probe_blocks
    from nmoe_core.quality.heads.train import FEATURES_DIR
    from nmoe_core.quality.kept_states import KeptStates

    model = load_backbone(run)
    limit = int(run.config.heads.cache_gib * 2**30)
    every = sorted({*probe_blocks(model.config.num_hidden_layers), *blocks})
    given = model, run.tree.heads / FEATURES_DIR, limit, every
    return KeptStates(*given, workers=state_workers(run))


def state_workers(run: Run) -> Workers | None:
    """Workers that compute states on several CPUs of this machine; None: this process does."""
    from nmoe_core.quality.kept_states import Workers

    compute = run.config.compute
    is_shared = compute.backend == "pool" and compute.workers > 1
    if not is_shared or run.config.backbone.device != "cpu":
        return None
    return Workers(compute, functools.partial(load_backbone, run))


def require_checkpoints(run: Run) -> None:
    """Check a run before its first task. Raises CheckpointError if its checkpoint is missing
    (E-CHECKPOINT-MISSING), and the errors of `ids_for_model` if its backbone cannot read its
    documents."""
    oracle = run.config.oracle
    if oracle.kind == "engine" and oracle.engine.checkpoint is not None:
        require_checkpoint(checkpoint_dir(run.base, oracle.engine.checkpoint))
    if run.config.backbone.kind == "checkpoint":
        ids_for_model(run)


def fetch_if_named(path: Path) -> None:
    """Fetch the checkpoint if its path is that of a named model and it is not there yet."""
    if (name := fetched_name(path)) is not None:
        from nmoe_core.engine.weights.fetch.get import fetch

        fetch(name)


def require_checkpoint(path: Path) -> None:
    """Fetch the checkpoint if it is named; raise CheckpointError if it is missing."""
    fetch_if_named(path)
    if not path.is_dir():
        raise CheckpointError(
            "no checkpoint at this path",
            where=path,
            do="materialise hydra/backbone, or correct the path of the checkpoint",
            code="E-CHECKPOINT-MISSING",
        )


@functools.lru_cache(maxsize=1)
def _loaded(path: Path, digest: str, device: str, dtype: str, backend: ExpertChoice) -> Transformer:
    """Load a backbone. `digest` is part of the cache key: changed weights are loaded again."""
    import torch

    from nmoe_core.engine import Transformer
    from nmoe_core.engine.backend import own_device

    return Transformer.from_checkpoint(
        path, device=own_device(device), dtype=getattr(torch, dtype), moe_backend=backend
    )
