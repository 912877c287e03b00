"""A small project made twice: the second time over more documents, which is where writers fail."""

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from loader.plan.file import load_plan
from nmoe_core.cli import main
from nmoe_core.tasks.curate import make_plan
from nmoe_core.tasks.report.account import commit_account
from tests.project import Project, json_lines, jsonl_source, write_project

WORDS = ("use the default value", "because each example", "returns a long explanation of it")
SETTINGS: dict[str, Any] = {
    "prep": {"num_shards": 2, "max_tokens": "all", "min_doc_tokens": 1, "workers": 1},
    "compute": {"workers": 1},
    "attributes": {"use": ["signals", "duplicates"], "files": {"mine": "in/mine.parquet"}},
    "oracle": {"max_doc_tokens": 32, "relabel": 10},
    "heads": {
        "max_ctx": 16,
        "probe": {"epochs": 1},
        "judge": {"epochs": 1, "mid_dim": 16, "num_heads": 4, "ffn_dim": 32},
    },
    "curation": {"where": "n_words > 5", "num_topics": 3},
    "checks": {"min_spearman": -1.0, "min_val_documents": 3},
    "seq_len": 64,
    "batch_size": 2,
}
NUM_DOCUMENTS = 300
# Tasks in their order, as the command line names them: with the student as the grader, and with the
# heads, which take longer.
LABELLED = ("prep-mixture", "hydra slices", "hydra oracle-label", "hydra merge-labels")
GRADED = ("hydra calibrate", "hydra grade")
STUDENT = (*LABELLED, "train student", *GRADED)
TASKS = (*STUDENT, "attributes", "curate shards", "loader plan")
SHORT = (*LABELLED, "attributes")
WITH_HEADS = (*LABELLED, "train probe", "train judge", *GRADED)


def rows_of(first: int, last: int) -> list[dict[str, str]]:
    """Documents `first` to `last`."""
    texts = (f"number {i} " + f"{WORDS[i % 3]} {i % 7} " * (1 + i % 5) for i in range(first, last))
    return [{"id": f"d{i}", "text": text} for i, text in enumerate(texts, first)]


def nmoe(words: str, *more: object) -> int:
    """The exit status of a command."""
    return main([*words.split(), *map(str, more)])


def run_task(project: Path, task: str) -> int:
    """The exit status of a task of the run in `project`; the loader plan has no verb of its own."""
    if task == "loader plan":
        run = Project(project).run
        make_plan(run, ["web"], ["web"])
        commit_account(run, load_plan(run.tree.plan))
        return 0
    words = [str(project / word) if word.endswith(".html") else word for word in task.split()]
    return nmoe(" ".join(words), "--config", project / "run.toml")


@dataclass
class Twice:
    """A project as it is before each of `tasks` in its second run, in `saved`; it always runs in
    `work`, so that files that name a path are equal."""

    work: Path
    saved: Path
    tasks: tuple[str, ...]

    @classmethod
    def make(cls, directory: Path, checkpoint: Path, tasks: tuple[str, ...]) -> "Twice":
        """Run all tasks, then add documents."""
        made = cls(directory / "work", directory / "saved", tasks)
        rows = rows_of(0, NUM_DOCUMENTS + 20)
        source = jsonl_source("web", rows[:-20], valid_split="train[:5%]", tokens_b=3e-6)
        grader = {"grader": "hydra" if tasks == WITH_HEADS else "student"}
        settings = {"backbone": {"checkpoint": str(checkpoint)}, "grading": grader, **SETTINGS}
        write_project(made.work, [source], settings)
        digests = [sha256(row["text"].encode()).hexdigest() for row in rows]
        table = pa.table({"text_sha256": digests, "stars": [3] * len(rows)})
        pq.write_table(table, made.work / "in" / "mine.parquet")
        for task in tasks:
            assert run_task(made.work, task) == 0, task
        (made.work / "in" / "web.jsonl").write_text(json_lines(rows))
        made.keep(tasks[0])
        return made

    def before(self, task: str) -> Path:
        """The kept project as it is before a task of the second run; of "end" after the last."""
        path = self._path(task)
        if not path.exists():
            order = (*self.tasks, "end")
            earlier = order[order.index(task) - 1]
            self.restore(self.before(earlier))
            assert run_task(self.work, earlier) == 0, earlier
            self.keep(task)
        return path

    def restore(self, saved: Path, parts: Iterable[str] = (".",)) -> None:
        """Put a kept project in its place, or only these parts of it."""
        for part in parts:
            for remove in (shutil.rmtree, os.unlink):
                with suppress(FileNotFoundError, NotADirectoryError):
                    remove(self.work / part)
            if (saved / part).is_dir():
                shutil.copytree(saved / part, self.work / part)
            elif (saved / part).exists():
                shutil.copy2(saved / part, self.work / part)

    def keep(self, task: str) -> Path:
        """Keep the project as it is now."""
        return shutil.copytree(self.work, self._path(task))

    def _path(self, task: str) -> Path:
        return self.saved / "_".join(task.split())
