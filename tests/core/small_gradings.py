"""What tests of labels, heads, calibration and grading share: small shards, fakes, a grading."""

import copy
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from loader.files.checksummed_json import sealed
from loader.files.format import Manifest, load_manifest
from nmoe_core.base.atomic import write_json
from nmoe_core.config.tree import Tree
from nmoe_core.engine import Transformer
from nmoe_core.labels.oracle import Keep, OracleResult, Question, Reply, Scorer, has_failed
from nmoe_core.labels.scores import QUALITY, Scale
from nmoe_core.labels.slices import combine_slices, read_slice, write_source_slices
from nmoe_core.quality.calibration.calibrate import calibrate
from nmoe_core.quality.calibration.graded import PartialRows
from nmoe_core.quality.calibration.summary_file import load_calibration, read_calibration
from nmoe_core.quality.calibration.targets import Targets
from nmoe_core.quality.grading.grade import Grader, grade_documents
from nmoe_core.quality.grading.inputs import GradeInput, docid_input, shard_input
from nmoe_core.quality.heads.head_files import save_head
from nmoe_core.quality.heads.models import Judge, Probe
from nmoe_core.quality.heads.scores import Corpus
from nmoe_core.quality.heads.scoring import HeadScorer, load_heads
from nmoe_core.quality.heads.shapes import JudgeArch, ProbeArch
from nmoe_core.quality.heads.student_file import make_student
from nmoe_core.shards.manifest import ShardFormat, combine_shards, shard_dir_name
from nmoe_core.shards.writer import ShardWriter
from tests.project import CONFIGS, read_rows

Results = Iterable[tuple[int, OracleResult]]
VOCAB = 512
EOS = 511
MAX_CTX = 24
RUBRIC = CONFIGS / "rubrics" / "quality_v1.toml"


def shard_format(source: str) -> ShardFormat:
    return ShardFormat(source, "v1", "fake", VOCAB, EOS, "fake-tokenizer")


def write_source(
    data_root: Path, source: str, documents: Sequence[Sequence[int]], num_shards: int = 2
) -> None:
    """Shards of a source; document `i` goes to shard `i mod num_shards`."""
    split = data_root / source / "train"
    fmt = shard_format(source)
    writers = [ShardWriter(split / shard_dir_name(i), fmt, 4000) for i in range(num_shards)]
    for i, tokens in enumerate(documents):
        digest = hashlib.sha256(repr(tokens).encode()).hexdigest()
        writers[i % num_shards].add_document(np.array(tokens, np.uint32), f"{source}:{i}", digest)
    for writer in writers:
        writer.finish({"made": "here"}, {"source": source})
    manifest = combine_shards(split, fmt, num_shards, {"source": source})
    write_json(split / "manifest.json", manifest)


def random_documents(seed: int, count: int) -> list[list[int]]:
    """Documents that differ in the tokens they use and in length (some beyond MAX_CTX)."""
    rng = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        words = rng.integers(0, 500, size=int(rng.integers(2, 12)))
        documents.append(rng.choice(words, size=int(rng.integers(3, 40))).tolist())
    return documents


@dataclass
class FakeTokenizer:
    """Decodes token 17 to `w17`."""

    fingerprint: str = "fake-tokenizer"
    eos_token_id: int = EOS
    name: str = "fake"
    vocab_size: int = VOCAB

    @property
    def reference(self) -> Any:
        return SimpleNamespace(spellings=lambda: {i: f"w{i}".encode() for i in range(VOCAB)})

    def decode(self, ids: np.ndarray) -> str:
        return " ".join(f"w{i}" for i in np.asarray(ids).tolist())

    def encode_long(self, text: str, max_tokens: int) -> np.ndarray:
        return np.array([int(word[1:]) for word in text.split()[:max_tokens]], np.uint32)


@dataclass
class FakeOracle:
    """Scores by the numbers in the text; remembers what it was asked; fails where told to.

    `change` alters the results of one call of `label`: which, how many, and in which order.
    """

    version: str = "v1"
    rubric_hash: str = "r"
    scale: Scale = QUALITY
    fails_on: Callable[[str], bool] = lambda text: False
    change: Callable[[Results], Results] = lambda results: results
    max_new: int | None = None
    served: str = "any"
    asked: list[str] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=lambda: {"backend": "fake"})

    @property
    def scorer(self) -> Scorer:
        return Scorer("fake", self.version, self.rubric_hash)

    @property
    def fingerprint(self) -> str:
        return self.scorer.name

    @property
    def request_digest(self) -> str:
        return f"{self.fingerprint}/{self.rubric_hash}"

    @property
    def request_digests(self) -> tuple[str, ...]:
        return (self.request_digest,)

    def settle(self, accepts: Callable[[str], bool | None]) -> None:
        pass

    def label(
        self, questions: Iterable[Question], keep: Keep | None = None
    ) -> Iterator[tuple[int, OracleResult]]:
        for i, result in self.change(self._results(questions)):
            if keep is not None and not has_failed(result):
                keep(i, Reply(json.dumps(asdict(result))))
            yield i, result

    def read(self, reply: Reply) -> OracleResult:
        return OracleResult(**json.loads(reply.body))

    def _results(self, questions: Iterable[Question]) -> Results:
        for i, question in enumerate(questions):
            self.asked.append(question.text)
            self.attempts.append(question.attempt)
            if self.fails_on(question.text):
                yield i, OracleResult(None, "no scores", "length")
            else:
                yield i, OracleResult(self.scores(question.text), "", "stop")

    def scores(self, text: str) -> dict[str, int]:
        numbers = [int(word[1:]) for word in text.split()]
        mean, grades = sum(numbers) / len(numbers), zip(self.scale.lowest, self.scale.highest)
        return {
            name: low + int(mean // (50 + 10 * i)) % (high - low + 1)
            for i, (name, (low, high)) in enumerate(zip(self.scale.names, grades))
        }


def slice_all(data_root: Path, slices_dir: Path) -> Path:
    """Slices of both sources; returns the directory."""
    tree = replace(Tree.below(slices_dir.parent, data=data_root), slices=slices_dir)
    for source in ("web", "books"):
        write_source_slices(tree, source)
    combine_slices(tree, ["web", "books"])
    return slices_dir


def write_labels(
    path: Path,
    rows: Sequence[tuple[str, str]],
    scores: np.ndarray,
    scale: Scale = QUALITY,
    **extra: Any,
) -> Path:
    """A merged label file of planted scores `[N, D]`; a value of `extra` may be one a row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        for i, (doc_id, source) in enumerate(rows):
            record = {
                "doc_id": doc_id,
                "source": source,
                "ok": True,
                "snippet": "",
                "scores": dict(zip(scale.names, (int(s) for s in scores[i]))),
                **scale.in_file(),
                "scorer_model": "fake",
                "scorer_version": "v1",
                "rubric_hash": "r",
            }
            more = {k: v[i] if isinstance(v, list) else v for k, v in extra.items()}
            file.write(json.dumps(record | more) + "\n")
    return path


def write_head(
    directory: Path,
    head: Probe | Judge,
    model: Transformer,
    seen: np.ndarray | None = None,
    **more: Any,
) -> Path:
    """The file of a head that was made on this backbone, after documents of the digests `seen`."""
    header = {"backbone": {"digest": model.digest}, "max_ctx": MAX_CTX, "scorer_model": "fake"}
    path = directory / f"hydra_{head.kind}.safetensors"
    save_head(path, head, header | more, seen)
    return path


@contextmanager
def spoiled(model: Transformer, tokens: Any, value: float) -> Iterator[None]:
    """Inside, the backbone's states of some tokens are not finite."""
    saved = model.embedding.data[tokens].clone()
    try:
        model.embedding.data[tokens] = value
        yield
    finally:
        model.embedding.data[tokens] = saved


@contextmanager
def killed_after_a_buffer() -> Iterator[None]:
    """The block must be a grading of more than one buffer: it is killed after the first."""
    append = PartialRows.append

    def killed(self: PartialRows, rows: Iterable[Any]) -> None:
        append(self, rows)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PartialRows, "append", killed)
        with pytest.raises(KeyboardInterrupt):
            yield


def token_of(documents: Iterable[np.ndarray], count: int) -> int:
    """A token that so many of the documents have."""
    counts = np.bincount(np.concatenate([np.unique(d) for d in documents]), minlength=VOCAB)
    return int(np.flatnonzero(counts == count)[0])


def write_student(labels: Mapping[str, Path | None], corpus: Corpus, heads_dir: Path) -> Path:
    """The file of a student of these labels, whose token 17 is `w17`."""
    tokenizer: Any = FakeTokenizer()
    return Path(make_student(labels, corpus, tokenizer, heads_dir).facts["path"])


def corpus_of(data_root: Path) -> Corpus:
    return Corpus(data_root, EOS, MAX_CTX)


@dataclass
class GradedShard:
    """What grading said of a shard, and where it wrote."""

    facts: dict[str, Any]
    directory: Path

    @property
    def path(self) -> Path:
        return self.directory / "quality_scores.jsonl"

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_bytes())

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.path)


class Grading:
    """Heads of random weights, a calibration with real exits, and shards to grade."""

    def __init__(self, base: Path, data: Path, model: Transformer) -> None:
        self.base, self.data, self.model = base, data, model
        self.heads, self.calibration = base / "heads", base / "calibration"
        slices = slice_all(data, base / "slices")
        self.rows = [r for s in ("train", "val") for r in read_slice(slices / f"docids_{s}.jsonl")]
        self.make_heads(seed=0)
        rng = np.random.default_rng(0)
        grades = rng.integers(0, 5, (len(self.rows), 5))
        self.labels = write_labels(base / "labels_val.jsonl", self.rows, grades)

    def copied(self, base: Path) -> "Grading":
        """The same in a directory of its own; shards elsewhere are shared."""
        shutil.copytree(self.base, base, dirs_exist_ok=True)
        made = copy.copy(self)
        for name in ("base", "data", "heads", "calibration", "labels"):
            path = getattr(self, name)
            if path.is_relative_to(self.base):
                setattr(made, name, base / path.relative_to(self.base))
        return made

    def make_heads(self, seed: int) -> None:
        torch.manual_seed(seed)
        probe, judge = Probe(ProbeArch(32)), Judge(JudgeArch(32, 16, 4, 32))
        for head, layer in ((probe, probe.proj), (judge, judge.shared_head)):
            # Around the middle of the scale, so that the clamp does not hide differences.
            torch.nn.init.constant_(layer.bias, 2.0)
            write_head(self.heads, head, self.model)

    def scorer(self, batch_size: int = 32) -> HeadScorer:
        return HeadScorer(self.model, load_heads(self.heads, self.model, MAX_CTX), batch_size)

    def calibrate(self, labels_test: Path | None = None, **targets: Any) -> dict[str, Any]:
        """The summary."""
        asked = Targets(**{"max_false_drop": 0.36, "target_keep": 0.4} | targets)
        graders = [(self.scorer(), corpus_of(self.data))]
        calibrate(self.labels, graders, self.calibration, asked, labels_test)
        return read_calibration(self.calibration / "calibration_summary.json")

    def grader(
        self, batch_size: int = 8, early_exit: bool = True, allow_foreign: bool = False
    ) -> Grader:
        return Grader.fitted(
            self.scorer(batch_size),
            load_calibration(self.calibration),
            early_exit,
            allow_foreign=allow_foreign,
        )

    def part_by_hand(self) -> None:
        """Thresholds that send documents every way; random heads would let none leave early."""
        rows = self.rows_of(self.rows, batch_size=32, early_exit=False)
        judged = [row["aggregated"] for row in rows]
        path = self.calibration / "calibration_summary.json"
        taus = {
            "tau_probe": float(np.quantile([row["q_probe"] for row in rows], 0.3)),
            "tau_drop": float(np.quantile(judged, 0.3)),
            "tau_keep": float(np.quantile(judged, 0.6)),
        }
        path.write_text(json.dumps(sealed(json.loads(path.read_text()) | taus)))

    def manifest(self, source: str = "web", shard: int = 0) -> Manifest:
        directory = self.data / source / "train" / f"shard_{shard:04d}"
        return load_manifest(directory / "manifest.json")

    def grade(self, source: str = "web", shard: int = 0, **grader: Any) -> GradedShard:
        """Grade a shard; `grader` is as for `Grading.grader`."""
        documents = shard_input(self.manifest(source, shard), self.data, source)
        directory = self.base / "quality" / source / f"shard_{shard:04d}"
        return self.grade_into(directory, documents, **grader)

    def grade_into(self, directory: Path, documents: GradeInput, **grader: Any) -> GradedShard:
        done = grade_documents(self.grader(**grader), documents, directory)
        return GradedShard(done.facts, directory)

    def rows_of(self, rows: Sequence[tuple[str, str]], **grader: Any) -> list[dict[str, Any]]:
        """What grading says of documents."""
        return list(self.grader(**grader).rows(docid_input(rows, self.data)))
