"""Selects the documents of a curated shard and plans their order.

`auto` tries each order of `AUTO_ORDERS`, and takes the order whose windows (of `seq_len` tokens,
filled by `packing`) hold the most topics. So it is never worse than `stratified`, the published
greedy order. `auto` takes `window_fill` if windows hold many documents, and another order if they
hold few.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import orjson

from nmoe_core.base.errors import CurationError
from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.base.settings import DEFAULT_TOKENS_PER_SHARD
from nmoe_core.curate.order import ORDERS, arrange
from nmoe_core.curate.windows import Loader, cut_windows
from nmoe_core.quality.calibration.thresholds import DECISIONS

CURATE_CODE = "curate/3"
AUTO = "auto"
AUTO_ORDERS = ("window_fill", "golden", "stratified")  # ties go to the first
By = Literal["source", "length", "quality"]
# `related` needs embeddings, which shards do not keep.
SHARD_ORDERS = (AUTO, *(name for name in ORDERS if name != "related"))
_OF_ONE_LENGTH = (AUTO, "window_fill", "bin_packing")


@dataclass(frozen=True, slots=True)
class CurateSettings:
    """Which documents to include and how to order them. Raises CurationError if a decision or order
    is unknown, the decisions are empty, or a number is out of range (E-CURATION-SETTINGS)."""

    include: tuple[str, ...] = ("keep",)  # decisions whose documents are kept
    where: str | None = None  # expressions that replace `include`, see `CurationTable.where_of`
    repeat: str | None = None  # expression: how often a document is read; needs `where`
    order: str = "golden"  # one of SHARD_ORDERS
    seed: int = 0
    epoch: int = 0  # each epoch gives a different, equally good order
    seq_len: int = 4096  # tokens per window
    packing: Loader = "concat"  # how the trainer fills windows
    by: By = "source"  # key by which `count_stride` sorts the documents of a topic
    descending: bool = False
    spread_copies: bool = False  # place kept copies far apart, if the order supports it
    # Number of tokens of this source that training has consumed. Consumed documents keep their
    # positions. None orders all documents.
    resume_from_token: int | None = None
    tokens_per_shard: int = DEFAULT_TOKENS_PER_SHARD  # most tokens of one file
    has_buckets: bool = False  # documents are written bucket by bucket, each in its own files

    def __post_init__(self) -> None:
        for what, found, known in (
            ("include", self.include, DECISIONS),
            ("order", (self.order,), SHARD_ORDERS),
        ):
            if not found or not set(found) <= set(known):
                raise _refuse(f"{what} is not known", found, f"of {', '.join(known)}")
        if self.seq_len < 1 or (self.resume_from_token or 0) < 0:
            found = f"seq_len {self.seq_len}, resume_from_token {self.resume_from_token}"
            raise _refuse("a number is out of range", found, "seq_len >= 1, resume_from_token >= 0")

    def decisions(self) -> list[str]:
        """`include` without repeats, sorted; all decisions if `where` is set."""
        return [name for name in DECISIONS if self.where is not None or name in self.include]

    def fills_windows(self) -> bool:
        """Whether the order depends on the shard's offset in its first window."""
        return self.order in (AUTO, "window_fill")

    def fingerprints(self) -> Fingerprints:
        """Fingerprints that all shards of a curated source share."""
        shared = {
            "code": CURATE_CODE,
            "include": ",".join(self.decisions()),
            **({} if self.where is None else {"where": self.where}),
            "order": self.order,
            "seed": str(self.seed),
            "tokens_per_shard": str(self.tokens_per_shard),
        }
        options = {
            "epoch": self.epoch or None,
            "by": (self.by, self.descending) if self.order == "count_stride" else None,
            "windows": (self.seq_len, self.packing) if self.order in _OF_ONE_LENGTH else None,
            "resume_from_token": self.resume_from_token,
        }
        return shared | {k: json.dumps(v) for k, v in options.items() if v is not None}


def plan_order(
    settings: CurateSettings,
    topics: np.ndarray,
    tokens: np.ndarray,
    quality_rows: Sequence[bytes],
    offset: int,
    groups: np.ndarray | None = None,
) -> tuple[str, np.ndarray]:
    """Compute the order; return its name (with `auto`, of the best order) and its permutation,
    int64 `[N]`.

    `quality_rows` are the documents' lines of `quality_scores.jsonl`; `offset` is the number of
    tokens before the first document in its window; `groups`, int64 `[N]`, are groups of copies, see
    `golden`. Raises CurationError if `by` is quality and a row has no score (E-CURATION-QUALITY).
    """
    windows: Any = {"seq_len": settings.seq_len, "loader": settings.packing, "offset": offset}
    options: dict[str, dict[str, Any]] = {
        "window_fill": windows,
        "bin_packing": {"seq_len": settings.seq_len},
        "count_stride": {"descending": settings.descending},
        "golden": {"groups": groups},
    }
    if settings.order == "count_stride" and settings.by != "source":
        column = tokens if settings.by == "length" else _scores(quality_rows)
        options["count_stride"] |= {"by": column}
    turn = {"seed": settings.seed, "epoch": settings.epoch}
    names = AUTO_ORDERS if settings.order == AUTO else (settings.order,)
    orders = {k: arrange(k, topics, tokens, **turn, **options.get(k, {})) for k in names}

    def mean_topics(name: str) -> float:
        rows = topics[orders[name]], tokens[orders[name]]
        return cut_windows(*rows, **windows).num_topics().mean()

    name = max(names, key=mean_topics) if len(names) > 1 and len(topics) else names[0]
    return name, orders[name]


def _scores(quality_rows: Sequence[bytes]) -> np.ndarray:
    scores = [orjson.loads(row).get("aggregated") for row in quality_rows]
    if any(not isinstance(score, (int, float)) for score in scores):
        raise CurationError(
            "a document without a score cannot be ordered by quality",
            found="aggregated is not a number",
            do="set [grading] grader and grade this shard again, or set another `by`",
            code="E-CURATION-QUALITY",
        )
    return np.asarray(scores, np.float64)


def _refuse(what: str, found: object, expected: str) -> CurationError:
    return CurationError(what, found=found, expected=expected, code="E-CURATION-SETTINGS")
