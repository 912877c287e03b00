"""Whole runs of `hydra oracle-label` against a judge's server, and the files that they write."""

from collections import Counter
from pathlib import Path

from nmoe_core.cli import main
from nmoe_core.labels.oracle import Record, read_records
from tests.core.labels.oracles.server import MODEL, JudgeServer
from tests.project import json_lines, read_rows


def model_of(server: JudgeServer) -> str:
    """The `[oracle]` of a run that asks the server."""
    return f'kind = "http"\n[oracle.http]\nmodel = "{MODEL}"\nbase_url = "{server.url}"'


def label(server: JudgeServer, root: Path, texts: list[str], *more: str) -> int:
    """Label texts into `root/out`; the exit status."""
    rows = [{"doc_id": f"d{i}", "text": text} for i, text in enumerate(texts)]
    (root / "in.jsonl").write_text(json_lines(rows))
    places = ["--input-jsonl", str(root / "in.jsonl"), "--out", str(root / "out")]
    flags = ["--oracle", "http"]
    flags += [
        f"--set=oracle.http.base_url={server.url}",
        f"--set=oracle.http.model={MODEL}",
        "--quiet",
    ]
    return main(["hydra", "oracle-label", *places, *flags, *more])


def records(root: Path) -> list[Record]:
    return list(read_records(root / "out" / "scores.jsonl"))


def labels(root: Path) -> dict[str, bytes]:
    """The files of the labels, without the ledger."""
    return {path.name: path.read_bytes() for path in (root / "out").iterdir() if path.is_file()}


def replies(root: Path) -> list[Record]:
    """The ledger."""
    return read_rows(*sorted((root / "out" / "answers").iterdir()))


def reasons(root: Path) -> Counter[str]:
    return Counter(record["finish_reason"] for record in records(root))
