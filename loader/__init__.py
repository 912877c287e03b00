"""Deterministic, elastic, exactly resumable loading of token shards. Needs numpy only."""

from loader.config import read_config, resolve_plan
from loader.edits.certificate import Certificate, verify_certificate
from loader.edits.masking import mask
from loader.edits.remix import remix
from loader.edits.twin import twin
from loader.errors import ConfigError, FormatError, NmoeError, PlanError, StateError
from loader.files.format import Manifest, load_manifest
from loader.files.shard import IndexReader, open_shard
from loader.files.spans import IGNORE_INDEX, attention_mask, cu_seqlens, document_ids, position_ids
from loader.loader import DeterministicLoader
from loader.metrics import SourceLosses, count_metrics, source_losses
from loader.opening import open_loader
from loader.plan.build import build_plan
from loader.plan.file import load_plan
from loader.plan.mixture import Stage, StageSource, resolve_stages
from loader.plan.records import LoaderPlan
from loader.plan.settings import PlanSettings
from loader.rows.forms import Batch
from loader.rows.loss_log import LossLog

__version__ = "0.1.0"

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "Certificate",
    "ConfigError",
    "DeterministicLoader",
    "FormatError",
    "IndexReader",
    "LoaderPlan",
    "LossLog",
    "Manifest",
    "NmoeError",
    "PlanError",
    "PlanSettings",
    "SourceLosses",
    "Stage",
    "StageSource",
    "StateError",
    "__version__",
    "attention_mask",
    "build_plan",
    "count_metrics",
    "cu_seqlens",
    "document_ids",
    "load_manifest",
    "load_plan",
    "mask",
    "open_loader",
    "open_shard",
    "position_ids",
    "read_config",
    "remix",
    "resolve_plan",
    "resolve_stages",
    "source_losses",
    "twin",
    "verify_certificate",
]
