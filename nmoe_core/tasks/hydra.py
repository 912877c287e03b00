"""Stages of HYDRA, from backbone to scores. torch is imported when one of them runs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from loader.files.format import MANIFEST_NAME, load_manifest
from nmoe_core.base.errors import ConfigError
from nmoe_core.base.fingerprint import sha256_file
from nmoe_core.base.result import Result
from nmoe_core.base.settings import ExpertChoice
from nmoe_core.config.run import Run
from nmoe_core.shards.manifest import shard_dir_name
from nmoe_core.tasks.checkpoints import require_checkpoint
from nmoe_core.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from nmoe_core.engine import Transformer
    from nmoe_core.heads.training import TrainReport

HeadKind = Literal["probe", "judge"]
LabelFiles = Mapping[str, Path | None]
NO_FILES: LabelFiles = MappingProxyType({})
CALIBRATION_FACTS = (
    *("tau_drop", "tau_keep", "tau_probe", "weights_source", "target_keep", "achieved_keep"),
    *("achieved_keep_ci95", "achieved_band", "achieved_drop", "early_exit_rate", "count"),
    *("dropping", "untouched"),
)


def make_backbone(run: Run) -> Result:
    """Make the tiny checkpoint if the run asks for one; digest the checkpoint either way.

    Raises:
        CheckpointError: There is no checkpoint, or it is not a gpt-oss one.
    """
    from nmoe_core.engine.weights.checkpoint import checkpoint_digest, open_checkpoint
    from nmoe_core.engine.weights.tiny import make_tiny_checkpoint

    table, path = run.config.backbone, run.paths.checkpoint
    if table.kind == "tiny":
        make_tiny_checkpoint(path, seed=table.seed)
    with open_checkpoint(path) as checkpoint:
        config = checkpoint.config
    facts = {
        "kind": "tiny: seeded random weights, a stand-in" if table.kind == "tiny" else "checkpoint",
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "experts": config.num_experts,
        "path": str(path),
    }
    return Result(checkpoint_digest(path), facts)


def label_slices(
    run: Run, sources: Sequence[str], keys: Iterable[str] | None = None
) -> dict[str, Result]:
    """Label slices named `train-00` and so on, by default all, with the run's oracle.

    Raises:
        ConfigError: There is no such slice.
        LabelError: As `label_shard`.
    """
    from nmoe_core.labels.document_texts import shard_documents
    from nmoe_core.labels.label import label_shard
    from nmoe_core.labels.noise import label_again
    from nmoe_core.labels.oracles import make_oracle
    from nmoe_core.labels.slices import (
        LABELLED_SPLITS,
        NUM_LABEL_SHARDS,
        combine_slices,
        shard_name,
    )

    known = [f"{split}-{i:02d}" for split in LABELLED_SPLITS for i in range(NUM_LABEL_SHARDS)]
    asked = known if keys is None else list(keys)
    for key in asked:
        if key not in known:
            raise ConfigError("no such slice", found=key, expected=f"{known[0]} to {known[-1]}")
    paths, table = run.paths, run.config.oracle
    combine_slices(paths.slices, sources)
    tokenizer = load_tokenizer(run.tokenizer, run.config.prep.engine)
    make = functools.cache(lambda asked: make_oracle(table, asked, run.resolve))
    options = {"replace": table.replace, "retry_failed": table.retry_failed}
    outputs = {}
    for key in asked:
        split, _, number = key.rpartition("-")
        out_dir = paths.labels / split / f"shard_{int(number)}"
        slice_file = paths.slices / shard_name(split, int(number))
        documents = shard_documents(slice_file, paths.data, tokenizer, table.max_doc_tokens)
        oracle = make(run.rubric)
        made = label_shard(documents, out_dir, oracle, **options)
        facts = {
            "documents": made.facts["total"],
            "parse_rate": made.facts["parsed"] / max(made.facts["total"], 1),
            "salvaged": made.facts["salvaged"],
            "oracle_calls": made.facts["num_new"],
            "scorer": oracle.scorer.name,
        }
        if split == "val" and table.relabel:
            turned = make(run.rubric.turned())
            again = label_again(documents, table.relabel, out_dir, turned, **options)
            facts["relabelled"] = again.facts["total"]
        outputs[key] = Result(made.digest, facts)
    return outputs


def merge_split(run: Run, split: str) -> Result:
    """Join the labels of a split into one file; a current one is left alone."""
    from nmoe_core.labels.files import merge_labels
    from nmoe_core.labels.noise import merge_noise

    made = merge_labels(run.tree.labels, split)
    facts = {"labels": made.facts["total"]}
    facts |= {key: made.facts[key] for key in ("parsed", "salvaged", "changed")}
    if (noise := merge_noise(run.tree.labels, split)) is not None:
        facts["oracle_reliability"] = noise["reliability"]
    return Result(made.digest, facts | {"path": str(run.tree.merged_labels(split))})


def train_head(run: Run, kind: HeadKind, labels: LabelFiles = NO_FILES) -> Result:
    """Train the probe or the judge on the merged labels; a current head is left alone.

    Args:
        run: The configuration.
        kind: Which head.
        labels: Files of labels by split, in place of the merged ones; None for no labels.
    """
    from nmoe_core.heads.train import train_judge, train_probe
    from nmoe_core.plots import loss_plot, png_markdown

    common: dict[str, Any] = {
        **{f"labels_{split}": _labels(run, labels, split) for split in ("train", "val", "test")},
        "model": load_backbone(run),
        "data_root": run.paths.data,
        "heads_dir": run.paths.heads,
        "eos_token_id": _eos_token_id(run),
        "max_ctx": run.config.heads.max_ctx,
        "seed": run.config.heads.seed,
        "use_salvaged": run.config.heads.use_salvaged,
    }
    if kind == "probe":
        report = train_probe(**common, **run.config.heads.probe.model_dump())
    else:
        cache_bytes = int(run.config.heads.cache_gib * 2**30)
        judge = run.config.heads.judge.model_dump()
        report = train_judge(**common, **judge, cache_bytes=cache_bytes)
    picture = png_markdown(loss_plot({kind: report.loss_curve}), f"loss of the {kind}")
    return Result(report.digest, head_facts(report), picture)


def import_head(run: Run, path: Path) -> Result:
    """Convert a pickled head, read as tensors only, to the head file of its kind."""
    from nmoe_core.heads.convert import import_pickle

    num_heads = run.config.heads.judge.num_heads
    made = import_pickle(
        path, run.paths.heads, load_backbone(run), run.config.heads.max_ctx, num_heads
    )
    return Result(sha256_file(made), {"path": str(made)})


def calibrate_heads(run: Run, labels: LabelFiles = NO_FILES) -> Result:
    """Fit weights and thresholds on the heads' own scores of val documents.

    Args:
        run: The configuration.
        labels: As those of `train_head`; test is only reported on.
    """
    from nmoe_core.calibration.calibrate import calibrate
    from nmoe_core.plots import calibration_plot, png_markdown

    table, model = run.config.calibration, load_backbone(run)
    tokens_before = model.tokens_processed
    report = calibrate(
        labels.get("val") or _merged(run, "val"),
        run.paths.heads,
        model,
        run.paths.data,
        run.paths.calibration,
        eos_token_id=_eos_token_id(run),
        max_ctx=run.config.heads.max_ctx,
        max_batch=run.config.grading.max_batch,
        target_keep=table.target_keep,
        max_false_drop=table.max_false_drop,
        target_drop=table.target_drop,
        labels_test=_labels(run, labels, "test"),
    )
    summary = report.summary
    facts = {key: summary[key] for key in CALIBRATION_FACTS}
    facts["backbone_tokens"] = model.tokens_processed - tokens_before
    picture = png_markdown(calibration_plot(summary), "keep rate and reliability")
    return Result(sha256_file(report.path), facts, picture)


def grade_shards(run: Run, source: str, buckets: Iterable[int]) -> dict[int, Result]:
    """Grade shards of a source; current ones are left alone."""
    from nmoe_core.grading.grade import grade_shard

    model, table = load_backbone(run), run.config.grading
    outputs = {}
    for bucket in buckets:
        name = shard_dir_name(bucket)
        report = grade_shard(
            run.paths.data,
            source,
            run.paths.split(source, "train") / name / MANIFEST_NAME,
            run.paths.quality / source / name,
            model,
            run.paths.heads,
            run.paths.calibration,
            run.config.heads.max_ctx,
            table.max_batch,
            early_exit=table.early_exit,
            compat=table.compat,
        )
        facts = {
            "documents": report.total,
            "kept": report.kept,
            "band": report.band,
            "dropped": report.dropped,
            "early_exits": report.early_exits,
            "failed": report.failed,
            "keep_rate": report.kept / max(report.total, 1),
            "backbone_tokens": report.backbone_tokens,
        }
        outputs[bucket] = Result(sha256_file(report.path), facts)
    return outputs


def head_facts(report: TrainReport) -> dict[str, Any]:
    """What a person looks at first of a trained head."""
    metrics = {
        key: value
        for key, value in report.metrics.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    return {
        **metrics,
        "labels": report.num_documents,
        "steps": report.num_steps,
        "head_steps": 0 if report.is_current else report.num_steps,
        "backbone_tokens": report.backbone_tokens,
        "path": str(report.path),
    }


def _labels(run: Run, files: LabelFiles, split: str) -> Path | None:
    """The labels of a split; None for a test split that is not labelled: older runs have none."""
    from nmoe_core.labels.files import SUMMARY_NAME
    from nmoe_core.labels.slices import NUM_LABEL_SHARDS

    if split in files:
        return files[split]
    shards = (run.tree.label_shard(split, i) for i in range(NUM_LABEL_SHARDS))
    if split == "test" and not all((shard / SUMMARY_NAME).is_file() for shard in shards):
        return None
    return _merged(run, split)


def _merged(run: Run, split: str) -> Path:
    from nmoe_core.labels.files import merge_labels
    from nmoe_core.labels.status import require_current_labels

    require_current_labels(run.paths.labels, split, run.paths.data)
    merge_labels(run.paths.labels, split)
    return run.tree.merged_labels(split)


def labelled_splits(run: Run) -> list[str]:
    """The splits to merge: test only where it was labelled, which older runs did not do."""
    from nmoe_core.labels.slices import LABELLED_SPLITS

    return [s for s in LABELLED_SPLITS if s != "test" or (run.tree.labels / s).is_dir()]


def _eos_token_id(run: Run) -> int:
    """The tokenizer's; where no file names a tokenizer, what the shards say."""
    if not run.has_file:
        return eos_of(run.tree.data)
    return load_tokenizer(run.tokenizer, run.config.prep.engine).eos_token_id


def load_backbone(run: Run) -> Transformer:
    """The run's backbone, loaded once in a process. Raises CheckpointError (E-CHECKPOINT-...)."""
    table = run.config.backbone
    return load_checkpoint(run.paths.checkpoint, table.device, table.dtype, table.experts)


def load_checkpoint(
    path: Path, device: str, dtype: str, experts: ExpertChoice = "auto"
) -> Transformer:
    """A checkpoint, loaded once in a process.

    Raises:
        CheckpointError: There is none (E-CHECKPOINT-MISSING), or it is not a gpt-oss one.
    """
    require_checkpoint(path)
    from nmoe_core.engine.weights.checkpoint import checkpoint_digest

    return _loaded(path, checkpoint_digest(path), device, dtype, experts)


def eos_of(data_root: Path) -> int:
    """The token that ends every document of the sources below a data root.

    Raises:
        ConfigError: There is no source, or two differ in it.
    """
    manifests = sorted(data_root.glob(f"*/train/{MANIFEST_NAME}"))
    found = sorted({load_manifest(path).eos_token_id for path in manifests})
    if len(found) != 1:
        raise ConfigError(
            "sources have no one token that ends documents",
            where=data_root,
            found=", ".join(map(str, found)) or "no manifest",
            do="name the directory that holds {source}/train/manifest.json",
        )
    return found[0]


@functools.lru_cache(maxsize=1)
def _loaded(path: Path, digest: str, device: str, dtype: str, experts: ExpertChoice) -> Transformer:
    """The backbone, loaded once in a process; `digest` makes changed weights another one."""
    import torch

    from nmoe_core.engine import Transformer

    return Transformer.from_checkpoint(
        path, device=device, dtype=getattr(torch, dtype), experts=experts
    )
