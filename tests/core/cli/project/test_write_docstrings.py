"""Docstrings of modules, the text of the demo."""

import ast
import gc
import json
from pathlib import Path

import pytest

from nmoe_core.cli.project import write_docstrings as module
from nmoe_core.cli.project.write_docstrings import docstrings, write_docstrings


class _ParsesWhenItIsFreed:
    """Garbage that only the collector frees."""

    freed = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        _ParsesWhenItIsFreed.freed += 1
        ast.parse("1 + 1")


@pytest.mark.parametrize("is_enabled", [True, False])
def test_docstrings_are_read_where_garbage_parses_too(tmp_path: Path, *, is_enabled: bool) -> None:
    module = tmp_path / "module.py"
    functions = [f"def f{i}(a):\n    'What f{i} does'\n    return a + {i}\n" for i in range(300)]
    module.write_text("".join(functions))
    before = gc.get_threshold()
    gc.set_threshold(100)
    (gc.enable if is_enabled else gc.disable)()
    try:
        for _ in range(20):
            garbage = [_ParsesWhenItIsFreed() for _ in range(50)]
            del garbage
            assert len(list(docstrings(module, "module", min_chars=5))) == 300
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()
        gc.set_threshold(*before)
    gc.collect()
    assert _ParsesWhenItIsFreed.freed


def test_short_docstrings_and_files_that_are_no_python_are_left_out(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("async def f():\n    'twelve chars'\n\nclass C:\n    'short'\n")
    rows = list(docstrings(module, "m", min_chars=12))
    assert rows == [{"id": "m:f:1", "text": "twelve chars"}]
    for text in ("{{ template }", f"'twelve chars'\na = {'-' * 30_000}1"):
        module.write_text(text)
        assert not list(docstrings(module, "m"))


def test_modules_but_no_tests_are_read_until_there_is_enough_and_the_same_ones_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/b.py", "c.py", "d.py", "a/tests/e.py", "test/f.py", "tests/test/g.py"):
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_text(f"'{name:.>500}'\n")
    monkeypatch.setattr(module.sysconfig, "get_path", lambda _: str(tmp_path / "lib"))
    ids = []
    for enough in (1501, 1001, 1000):
        monkeypatch.setattr(module, "TOTAL_BYTES", enough)
        out = tmp_path / "deep" / "down" / "out.jsonl"
        said = write_docstrings(out)
        ids.append([json.loads(line)["id"] for line in out.read_text().splitlines()])
        assert said == f"{out}: {len(ids[-1])} docstrings, {len(ids[-1]) * 500 / 1e6:.1f} MB"
    assert sorted(ids[0]) == ["a.b::0", "c::0", "d::0"]
    assert ids[1:] == [ids[0], ids[0][:2]]
