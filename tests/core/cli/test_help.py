"""What the command line says of itself: examples, defaults, near names, completion, progress."""

import argparse
import importlib
import json
import logging
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from nmoe_core.base.progress import LOGGER, Meter
from nmoe_core.cli import build_parser, main
from nmoe_core.cli.help.completion import SHELLS
from nmoe_core.cli.help.examples import EXAMPLES
from nmoe_core.cli.help.parser import HelpfulParser
from nmoe_core.cli.help.status import progress_shown
from tests.refusals import refused_line

Output = pytest.CaptureFixture[str]
COMMANDS = [
    (prog, part.split(" > ")[0].strip())
    for prog, lines in EXAMPLES.items()
    for line in lines
    for part in line.split("&&")
]


@pytest.mark.parametrize(("prog", "example"), COMMANDS)
def test_every_example_is_a_command_of_its_verb_and_stands_in_its_help(
    prog: str, example: str, capsys: Output
) -> None:
    words = shlex.split(example)
    assert " ".join(words).startswith(prog)
    assert callable(build_parser().parse_args(words[1:]).run)
    with pytest.raises(SystemExit) as ended:
        main([*prog.split()[1:], "--help"])
    assert ended.value.code == 0
    assert example in capsys.readouterr().out


def test_a_verb_without_an_example_cannot_be_added() -> None:
    with pytest.raises(KeyError):
        HelpfulParser(prog="nmoe new-verb")


def test_help_shows_the_default_of_each_flag_once() -> None:
    parser = HelpfulParser(prog="nmoe ui")
    group = parser.add_argument_group("more")
    for owner, flag in ((parser, "a"), (group, "b")):
        owner.add_argument(f"--{flag}1", type=int, default=7, help="a number")
        owner.add_argument(f"--{flag}2", default="50 %", help="a share")
        owner.add_argument(f"--{flag}3", default="x", help="default: beside it")
        owner.add_argument(f"--{flag}4", help="none")
        owner.add_argument(f"--{flag}5", action="store_true", help="a switch")
        owner.add_argument(f"--{flag}6", default=argparse.SUPPRESS, help="hidden")
    text = parser.format_help()
    assert text.count("(default 7)") == text.count("(default 50 %)") == 2
    assert text.count("default") == 6


@pytest.mark.parametrize(
    ("command", "near"),
    [
        ("plan --sampel 3", "--sample"),
        ("hydra grade --config a.toml --batch-sise=3", "--batch-size"),
        ("report --jsno", "--json"),
        ("report --zzzz", ""),
        ("verify a.json stray", ""),
    ],
)
def test_a_misspelt_flag_is_answered_with_the_nearest_of_its_verb(
    command: str, near: str, capsys: Output
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    usage, message = capsys.readouterr().err.split("error: ")
    assert ended.value.code == 2
    assert usage.startswith(f"usage: nmoe {command.split(' -')[0].split(' a.')[0]}")
    assert (f"did you mean {near}" in message) if near else ("did you mean" not in message)


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_every_verb_and_its_flags(
    shell: str, tmp_path: Path, capsys: Output
) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("oracle-label", "calibrate-k", "sample", "parquet"):
        assert word in script
    if (program := shutil.which(shell)) is not None:
        (tmp_path / "nmoe").write_text(script)
        command = [program, "-n", str(tmp_path / "nmoe")]
        assert subprocess.run(command, check=False).returncode == 0


def test_bash_completes_verbs_flags_and_choices(tmp_path: Path, capsys: Output) -> None:
    pytest.importorskip("shtab")
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    main(["completion", "bash"])
    script = tmp_path / "nmoe"
    script.write_text(capsys.readouterr().out)
    for words, expected in (("nmoe rep", "report"), ("nmoe plan --sa", "--sample")):
        count = len(words.split()) - 1
        program = f"source {script}; COMP_WORDS=({words}); COMP_CWORD={count}; _shtab_nmoe"
        found = subprocess.run(
            [bash, "-c", f'{program}; echo "${{COMPREPLY[@]}}"'],
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout.split() == [expected]


def test_completion_without_shtab_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert "pip install shtab" in refused_line(capsys, "completion", "bash", code="E-CONFIG-EXTRA")


def test_long_work_says_how_much_is_done_at_which_rate_and_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with progress_shown():
        meter = Meter("grade web", 1000)
        for _ in range(500):
            now[0] += 1.0
            meter.add(2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "grade web: 10 of 1,000 documents, 2.0 per second, 8 min 15 s left"
    assert 20 < len(lines) < 60
    meter.add()
    assert capsys.readouterr().err == ""
    assert not logging.getLogger(LOGGER).handlers


@pytest.mark.parametrize(
    ("total", "done", "seconds", "line"),
    [
        (106, 6, 60, "6 of 106 documents, 0.1 per second, 16 min 40 s left"),
        (106, 5, 60, "5 of 106 documents, 5.0 per minute, 20 min 12 s left"),
        (None, 6, 60, "6 documents, 0.1 per second"),
        (9, 0, 60, "0 of 9 documents, 0.0 per minute"),
        (61, 1, 1, "1 of 61 documents, 1.0 per second, 1 min 0 s left"),
        (60, 1, 1, "1 of 60 documents, 1.0 per second, 59 s left"),
        (3601, 1, 1, "1 of 3,601 documents, 1.0 per second, 1 h 0 min left"),
        (3600, 1, 1, "1 of 3,600 documents, 1.0 per second, 59 min 59 s left"),
    ],
)
def test_rates_and_times_are_said_in_units_that_fit(
    total: int | None, done: int, seconds: float, line: str
) -> None:
    meter = Meter("grade web", total)
    meter.done = done
    assert meter.line(seconds) == line


def test_what_a_verb_makes_is_printed_as_json_on_request(tmp_path: Path, capsys: Output) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "tiny"
    assert main(["make-tiny-checkpoint", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(path)
