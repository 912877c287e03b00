"""Bytes of shards do not depend on the machine's settings; what may not be written is one error."""

import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.cli import main
from tests.project import REPOSITORY, contents, json_lines, output_of
from tests.refusals import refused_line

ROWS = [{"id": f"é{i}", "text": f"A naïve text of 東京, number {i}. " * 9} for i in range(30)]
LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
TIME_ZONE = {"TZ": "Asia/Kathmandu"}
UMASK = 0o077


def _command(directory: Path, output: Path) -> list[str]:
    paths = ["--paths", str(directory / "in.jsonl"), "--output", str(output), "--workers", "1"]
    return ["prep", "--source", "jsonl", "--name", "web", "--num-shards", "2", *paths]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the input, and its shards in `whole`."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    (tmp_path / "in.jsonl").write_text(json_lines(ROWS))
    assert main(_command(tmp_path, tmp_path / "whole")) == 0
    return tmp_path


def _tokens(directory: Path) -> dict[str, bytes]:
    found = contents(directory)
    return {name: payload for name, payload in found.items() if "." not in name.split("/")[-1][:1]}


def test_locale_time_zone_and_umask_change_no_byte(made: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | LOCALE | TIME_ZONE
    command = [sys.executable, "-m", "nmoe_core", *_command(made, made / "odd")]
    output_of(*command, env=environment, cwd=REPOSITORY, umask=UMASK)
    assert _tokens(made / "odd") == _tokens(made / "whole")
    modes = [path.stat().st_mode for path in (made / "odd").rglob("*")]
    assert not any(mode & (stat.S_IRWXG | stat.S_IRWXO) for mode in modes)


def test_line_ends_of_windows_change_no_shard(made: Path) -> None:
    text = (made / "in.jsonl").read_bytes()
    (made / "in.jsonl").write_bytes(text.replace(b"\n", b"\r\n"))
    assert main(_command(made, made / "odd")) == 0
    kinds = (".npy", ".idx", ".ids.jsonl")
    found, whole = (
        {name: payload for name, payload in _tokens(made / part).items() if name.endswith(kinds)}
        for part in ("odd", "whole")
    )
    assert found == whole


@pytest.mark.parametrize("what", ["output", "input"])
def test_what_may_not_be_opened_is_one_line_and_nothing_is_left(
    made: Path, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Permissions do not bind root, so the refusal of the system is simulated.
    forbidden = made / ("denied" if what == "output" else "in.jsonl")
    for name in ("open", "mkdir"):
        real = getattr(os, name)

        def refuse(path: Any, *args: Any, _real: Any = real, **more: Any) -> Any:
            if isinstance(path, str | Path) and Path(path).is_relative_to(forbidden):
                raise PermissionError(13, "Permission denied", str(path))
            return _real(path, *args, **more)

        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr("builtins.open", _opener(forbidden))
    monkeypatch.setattr("io.open", _opener(forbidden))
    line = refused_line(capsys, *_command(made, made / "denied"), code="E-")
    assert str(forbidden) in line
    assert "ermission" in line
    assert {path.relative_to(made).parts[0] for path in made.rglob("*.npy")} == {"whole"}


def _opener(forbidden: Path) -> Any:
    real = open

    def opened(path: Any, *args: Any, **more: Any) -> Any:
        if isinstance(path, str | Path) and Path(path).is_relative_to(forbidden):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **more)

    return opened
