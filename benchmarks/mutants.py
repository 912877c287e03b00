"""Do the tests notice? Draws small changes of product code, and runs the tests of its area on each.

    python -m benchmarks.mutants --seed 7 --count 40 loader/order nmoe_core/takedown

A mutant changes one comparison, operator, condition or small constant of a function, in a copy of
the tree. It is killed where the tests fail or do not end. The share of killed mutants is printed,
and the change of each survivor: it shows a missing test, or changes nothing that can be observed.
"""

import argparse
import ast
import copy
import difflib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
# Directories or files of the product, and the tests of each; those that end in seconds come first.
AREAS: dict[str, tuple[str, ...]] = {
    "loader/order": (
        "tests/loader/test_schedule.py",
        "tests/loader/test_policies.py",
        "tests/loader/test_packed.py",
        "tests/loader/test_twin.py",
    ),
    "loader/state.py": (
        "tests/loader/test_state.py",
        "tests/loader/test_continuations.py",
        "tests/loader/test_remix.py",
    ),
    "loader/files": ("tests/loader/test_format.py", "tests/core/shards"),
    "loader/plan": ("tests/loader/test_plan.py", "tests/loader/test_mixture.py"),
    "loader/rows": ("tests/loader/test_rows.py", "tests/loader/test_spans.py", "tests/loader"),
    "nmoe_core/base": ("tests/core/test_docid.py", "tests/core/test_files.py", "tests/core/labels"),
    "nmoe_core/shards": ("tests/core/shards", "tests/core/prep"),
    "nmoe_core/sources": ("tests/core/sources",),
    "nmoe_core/calibration": ("tests/core/calibration", "tests/core/grading"),
    "nmoe_core/labels": ("tests/core/labels",),
    "nmoe_core/curate/order": (
        "tests/core/curate/test_order.py",
        "tests/core/curate/test_curated.py",
    ),
    "nmoe_core/curate/diversity": ("tests/core/curate/test_diversity.py",),
    "nmoe_core/takedown": ("tests/core/takedown",),
    "nmoe_core/seen": ("tests/core/seen",),
    "nmoe_core/prep": ("tests/core/prep/test_run.py", "tests/core/prep"),
    "nmoe_core/heads": ("tests/core/heads",),
    "nmoe_core/engine/model.py": ("tests/core/engine/test_forward.py", "tests/core/engine"),
    "nmoe_core/engine/weights": ("tests/core/engine/test_checkpoint.py", "tests/core/engine"),
    "nmoe_core/engine/generation": ("tests/core/engine",),
}
_PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)]
_COMPARED = dict([*_PAIRS, *((b, a) for a, b in _PAIRS), (ast.In, ast.NotIn), (ast.NotIn, ast.In)])
_PAIRS = [(ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.BitAnd, ast.BitOr)]
_OPERATORS = dict([*_PAIRS, *((b, a) for a, b in _PAIRS), (ast.Mod, ast.Mult), (ast.Div, ast.Mult)])
_LARGEST = 64  # of the constants that are changed by one


@dataclass(frozen=True)
class Mutant:
    """A file with one change."""

    area: str
    file: str
    line: int
    text: str

    def diff(self) -> str:
        """The changed lines."""
        before = (REPOSITORY / self.file).read_text().splitlines()
        lines = difflib.unified_diff(before, self.text.splitlines(), lineterm="", n=0)
        return "\n".join(line for line in lines if line[:3] not in ("---", "+++"))


def changes_of(node: ast.AST) -> Iterator[Callable[[], ast.AST]]:
    """What can stand in the place of a node; its children stay those of the tree."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            if type(op) in _COMPARED:
                ops = [*node.ops[:i], _COMPARED[type(op)](), *node.ops[i + 1 :]]
                yield lambda ops=ops: ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield lambda: ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield lambda: ast.BoolOp(other, node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
        yield lambda: node.operand
    elif isinstance(node, ast.IfExp | ast.If):
        yield lambda: ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        if abs(node.value) <= _LARGEST:
            yield lambda: ast.Constant(node.value + 1)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield lambda: ast.Constant(not node.value)


def mutants_of(area: str, path: Path) -> list[Mutant]:
    """Every mutant of a file's functions."""
    source, name = path.read_text(), path.relative_to(REPOSITORY).as_posix()
    tree, found = ast.parse(source), []
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    nodes = {id(n): n for f in functions for part in f.body for n in ast.walk(part)}
    # Pieces of an f-string have no place of their own before Python 3.12.
    for joined in [n for n in nodes.values() if isinstance(n, ast.JoinedStr)]:
        for inner in ast.walk(joined):
            nodes.pop(id(inner), None)
    for node in nodes.values():
        target = node.test if isinstance(node, ast.If | ast.IfExp) else node
        for change in changes_of(node):
            replaced = ast.unparse(ast.fix_missing_locations(copy.deepcopy(change())))
            text = _with(source, target, f"({replaced})")
            found.append(Mutant(area, name, target.lineno, text))  # pyright: ignore
    return found


def _with(source: str, node: ast.AST, replaced: str) -> str:
    """The source with other text in the place of a node."""
    lines = source.encode().splitlines(keepends=True)
    first = sum(map(len, lines[: node.lineno - 1])) + node.col_offset  # pyright: ignore
    last = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset  # pyright: ignore
    payload = source.encode()
    return (payload[:first] + replaced.encode() + payload[last:]).decode()


def draw(areas: Sequence[str], seed: int, count: int) -> list[Mutant]:
    """So many mutants, as many of each area; the same ones for a seed."""
    rng, drawn = random.Random(seed), []
    for i, area in enumerate(areas):
        root = REPOSITORY / area
        files = [root] if root.is_file() else sorted(root.rglob("*.py"))
        every = [mutant for path in files for mutant in mutants_of(area, path)]
        share = count // len(areas) + (i < count % len(areas))
        drawn += rng.sample(every, min(share, len(every)))
    return drawn


def copied_tree(directory: Path) -> Path:
    """A copy of the files that git knows or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True).stdout
    for name in names.decode().split("\0"):
        if (REPOSITORY / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, directory / name)
    return directory


def is_noticed(tree: Path, area: str, limit_s: float | None = None) -> bool:
    """Whether the tests of the area fail in the tree, or do not end within the limit."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *AREAS[area]]
    paths = os.pathsep.join([str(tree), str(tree / "loader")])
    env = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        return subprocess.run(command, cwd=tree, env=env, timeout=limit_s, **silent).returncode != 0
    except subprocess.TimeoutExpired:
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("areas", nargs="*", default=[*AREAS], metavar="AREA", help=", ".join(AREAS))
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--count", type=int, default=40, help="mutants over all areas")
    args = parser.parse_args()
    if unknown := set(args.areas) - set(AREAS):
        parser.error(f"unknown areas {sorted(unknown)}; known are {', '.join(AREAS)}")
    survivors, limits_s = [], {}
    mutants = draw(args.areas, args.seed, args.count)
    print(f"seed {args.seed}: {len(mutants)} mutants", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        tree = copied_tree(Path(directory))
        for mutant in mutants:
            if mutant.area not in limits_s:
                started = time.monotonic()
                if is_noticed(tree, mutant.area):
                    parser.error(f"the tests of {mutant.area} fail without a mutant")
                limits_s[mutant.area] = 60 + 3 * (time.monotonic() - started)
            path = tree / mutant.file
            path.write_text(mutant.text)
            if is_killed := is_noticed(tree, mutant.area, limits_s[mutant.area]):
                print(f"killed    {mutant.file}:{mutant.line}", flush=True)
            shutil.copy2(REPOSITORY / mutant.file, path)
            if not is_killed:
                survivors.append(mutant)
                print(f"SURVIVED  {mutant.file}:{mutant.line}\n{mutant.diff()}", flush=True)
    killed = len(mutants) - len(survivors)
    print(f"{killed} of {len(mutants)} killed ({killed / max(len(mutants), 1):.0%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
