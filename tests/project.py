"""A small project on disk: the run's TOML, a mixture, a flow and input files. Every test's project.

project = write_project(tmp_path, [jsonl_source("web", rows)], {"prep": {"num_shards": 3}})
main(["prep-mixture", "--config", str(project.config)])
"""

import json
import re
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.cli import main
from nmoe_core.config.run import Run

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = REPOSITORY / "configs"
TOKENS_B = 0.00001  # of a mixture: ten thousand tokens


@dataclass(frozen=True)
class Source:
    """One source of the mixture, and the input files that it reads.

    Attributes:
        table: Its keys in the mixture; `tokens_b` may be left out.
        files: Text of each input file, by its path in the project.
    """

    table: Mapping[str, Any]
    files: Mapping[str, str]


@dataclass(frozen=True)
class Project:
    """A project in `directory`."""

    directory: Path

    @property
    def config(self) -> Path:
        """The run's TOML."""
        return self.directory / "run.toml"

    @property
    def run(self) -> Run:
        """The checked run, read again."""
        return Run(self.config)


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Text of a JSONL file."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def read_rows(*paths: Path) -> list[dict[str, Any]]:
    """Rows of JSONL files."""
    return [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines()]


def contents(directory: Path, pattern: str = "*") -> dict[str, bytes]:
    """Bytes of the files below a directory, by their paths in it; locks are left out."""
    files = (path for path in sorted(directory.rglob(pattern)) if path.is_file())
    return {str(p.relative_to(directory)): p.read_bytes() for p in files if p.name != ".lock"}


def product_tests() -> set[str]:
    """The name of every test function."""
    files = (REPOSITORY / "tests").rglob("test_*.py")
    return {name for file in files for name in re.findall(r"def (test_\w+)\(", file.read_text())}


def said(capsys: pytest.CaptureFixture[str], *argv: object, status: int = 0) -> Any:
    """What a verb prints with `--json`."""
    capsys.readouterr()
    assert main([*map(str, argv), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def output_of(*command: object, **options: Any) -> str:
    """What a program prints; it must end well. `options` are those of `subprocess.run`."""
    options = {"capture_output": True, "text": True, "check": False} | options
    done = subprocess.run([str(part) for part in command], **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@contextmanager
def failing(failpoint: str) -> Iterator[None]:
    """Steps of the block are counted from one; that of the failpoint fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nmoe_core.base.atomic._steps", Counter())
        patch.setenv("NMOE_FAILPOINT", failpoint)
        yield


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """In the block no file gets longer, whatever library writes it: the system says EFBIG."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is not reported among what the tested command prints."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serving(handler: Callable[..., object]) -> Iterator[tuple[str, Callable[[], None]]]:
    """A server of HTTP on this machine: its address, and what ends it before the block does."""
    server = _Server(("127.0.0.1", 0), handler)  # pyright: ignore[reportArgumentType]
    # It looks so often whether it is to stop, for which each test would wait half a second.
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()

    def stop() -> None:
        if thread.is_alive():
            server.shutdown()
            server.server_close()
            thread.join()

    try:
        yield f"127.0.0.1:{server.server_port}", stop
    finally:
        stop()


def in_foreground(*arguments: object) -> list[str]:
    """A command of `nmoe` that is not deaf to Ctrl-C: what a shell starts in its background, and
    tests in that, inherit an ignored SIGINT."""
    code = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "runpy.run_module('nmoe_core', run_name='__main__')"
    return [sys.executable, "-c", code, *map(str, arguments)]


def jsonl_source(name: str, rows: Iterable[Mapping[str, Any]], **keys: Any) -> Source:
    """A source that reads `in/{name}.jsonl`."""
    path = f"in/{name}.jsonl"
    table = {"id": name, "kind": "jsonl", "paths": [path], **keys}
    return Source(table, {path: json_lines(rows)})


def write_project(
    directory: Path, sources: Sequence[Source], settings: Mapping[str, Any] | None = None
) -> Project:
    """Write the project: root `out`, two shards per source, all of the input.

    Args:
        directory: Where; made if it is missing.
        sources: The mixture.
        settings: Keys and tables of the run, over those above; tables are merged.
    """
    share = TOKENS_B / max(len(sources), 1)
    tables = [{"tokens_b": share, **source.table} for source in sources]
    mix = {"total_tokens_b": sum(table["tokens_b"] for table in tables), "sources": tables}
    small = {"mode": "small", "stages": ["pretrain"], "scale": 1.0, "mixture": {"pretrain": "mix"}}
    run: dict[str, Any] = {
        "root": "out",
        "mixture_toml": "mixture.toml",
        "flow_profiles_toml": "flows.toml",
        "flow_mode": "small",
        "prep": {"num_shards": 2, "max_tokens": "all"},
    }
    files = {
        "workspace.yaml": "",
        "run.toml": toml(_merged(run, settings or {})),
        "mixture.toml": toml({"mixtures": {"mix": mix}}),
        "flows.toml": toml({"flow": {"small": small}}),
    }
    for source in sources:
        files |= source.files
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Project(directory)


def toml(table: Mapping[str, Any], name: str = "") -> str:
    """A TOML document; None leaves a key out."""
    lines, tables = [], []
    for key, value in table.items():
        path = f"{name}.{key}".lstrip(".")
        if isinstance(value, Mapping):
            tables.append(f"[{path}]\n{toml(value, path)}")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            tables += [f"[[{path}]]\n{toml(item, path)}" for item in value]
        elif value is not None:
            lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}\n")
    return "".join(lines + tables)


def _merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
