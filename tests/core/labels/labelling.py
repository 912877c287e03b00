"""Slices and labels of one small tree, made with the fakes."""

import json
from pathlib import Path
from typing import Any

from nmoe_core.base.result import Result
from nmoe_core.config.tree import Tree
from nmoe_core.labels.answers import Ledger
from nmoe_core.labels.documents import Documents, shard_documents
from nmoe_core.labels.label import label_shard
from nmoe_core.labels.oracle import Oracle, Record, read_records
from tests.core.small_gradings import FakeOracle, FakeTokenizer, slice_all
from tests.project import contents


class Labelling:
    """Labels the slices of a tree, `train_shard_00` where no other is named."""

    def __init__(self, base: Path, data_root: Path) -> None:
        self.tree = Tree.below(base, data=data_root)
        slice_all(data_root, self.tree.slices)
        self.merged = self.tree.merged_labels("val")

    def shard(self, i: int = 0, split: str = "train") -> Path:
        return self.tree.label_shard(split, i)

    def documents(self, i: int = 0, split: str = "train", max_doc_tokens: int = 16) -> Documents:
        path = self.tree.slice(split, i)
        return shard_documents(path, self.tree.data, FakeTokenizer(), max_doc_tokens)

    def run(
        self,
        oracle: Oracle | None = None,
        i: int = 0,
        split: str = "train",
        max_doc_tokens: int = 16,
        **more: Any,
    ) -> Result:
        documents, ledger = self.documents(i, split, max_doc_tokens), Ledger(self.tree.answers)
        out_dir = self.shard(i, split)
        return label_shard(documents, out_dir, oracle or FakeOracle(), ledger=ledger, **more)

    def run_again(
        self, i: int, count: int, oracle: Oracle | None = None, name: str = "relabelled"
    ) -> None:
        """Label some of a val shard's documents a second time."""
        sample, out_dir = self.documents(i, "val").sample(count), self.shard(i, "val")
        ledger = Ledger(self.tree.answers)
        label_shard(sample, out_dir / name, oracle or FakeOracle(), ledger=ledger)

    def run_all(self, oracle: Oracle | None = None) -> None:
        for split in ("train", "val"):
            for i in range(8):
                self.run(oracle, i, split)

    def files(self) -> dict[str, bytes]:
        return contents(self.shard())

    def records(self) -> list[Record]:
        return list(read_records(self.shard() / "scores.jsonl"))

    def summary(self) -> dict[str, Any]:
        return json.loads((self.shard() / "summary.json").read_text())

    @property
    def ledger_file(self) -> Path:
        return self.tree.answers / "train-shard_0.jsonl"

    def lines(self) -> list[bytes]:
        """The lines of the ledger."""
        return self.ledger_file.read_bytes().splitlines(keepends=True)

    def break_off(self, *left: bytes) -> None:
        """The state of a labelling that was killed when the ledger held these bytes."""
        self.ledger_file.write_bytes(b"".join(left))
        for name in ("scores.jsonl", "summary.json"):
            (self.shard() / name).unlink(missing_ok=True)
