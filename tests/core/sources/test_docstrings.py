"""Docstrings of modules, the text of the demo."""

import ast
import gc
from pathlib import Path

import pytest

from nmoe_core.sources.write_docstrings import docstrings


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
    module.write_text("{{ template }")
    assert not list(docstrings(module, "m"))
