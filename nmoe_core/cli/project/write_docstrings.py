"""Write the docstrings of the installed packages as JSON lines: real text for the demo.

    python -m nmoe_core.cli.project.write_docstrings build/demo/input/docstrings.jsonl

Modules are read in an order seeded by their names until about 4 MB are written, so the same
environment always gives the same file. Each line has `id` (module and qualified name) and `text`.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from loader.files.regular import read_file
from nmoe_core.base.atomic import write_jsonl
from nmoe_core.base.compute.garbage import gc_paused

TOTAL_BYTES = 4_000_000
MIN_CHARS = 400


def module_files(packages: Path) -> list[Path]:
    """Python files of the installed packages in seeded order, without tests."""
    files = [p for p in packages.rglob("*.py") if "tests" not in p.parts and "test" not in p.parts]
    return sorted(
        files, key=lambda p: hashlib.md5(p.relative_to(packages).as_posix().encode()).digest()
    )


def docstrings(path: Path, module: str, min_chars: int = MIN_CHARS) -> Iterator[dict[str, str]]:
    """Yield the docstrings of one module with at least `min_chars` characters, in source order."""
    try:
        tree = _parsed(read_file(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # a template, syntax of another Python version, or code that is nested too deeply
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and len(text) >= min_chars:
                line = getattr(node, "lineno", 0)
                yield {"id": f"{module}:{getattr(node, 'name', '')}:{line}", "text": text}


def _parsed(code: bytes) -> ast.Module:
    """The syntax tree of a module.

    The garbage collector is paused. Python 3.11 counts the parse depth once per process; if the
    collector runs a finalizer that parses too, or lets another thread parse, the outer parse fails
    with "SystemError: AST constructor recursion depth mismatch".
    """
    with gc_paused(), warnings.catch_warnings():
        # warnings about invalid escapes in other packages
        warnings.simplefilter("ignore", SyntaxWarning)
        return ast.parse(code)


def write_docstrings(output: Path) -> str:
    """Write the file; return its counts."""
    packages = Path(sysconfig.get_path("purelib"))
    rows: list[dict[str, str]] = []
    size_bytes = 0
    for path in module_files(packages):
        relative = path.relative_to(packages)
        for row in docstrings(path, ".".join(relative.with_suffix("").parts)):
            rows.append(row)
            size_bytes += len(row["text"].encode())
        if size_bytes >= TOTAL_BYTES:
            break
    write_jsonl(output, rows)
    return f"{output}: {len(rows):,} docstrings, {size_bytes / 1e6:.1f} MB"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the docstrings of installed packages.")
    parser.add_argument("output", type=Path, help="the file to write")
    print(write_docstrings(parser.parse_args().output))
