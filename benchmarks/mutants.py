"""Do the tests notice? Draws small changes of product code, and runs the tests that reach each.

    python -m benchmarks.mutants --seed 7 --count 40 loader/order nmoe_core/audit/takedown

A mutant changes one comparison, operator, condition or small constant of a function, in a copy of
the tree. One run of the tests, measured by `coverage`, says which of them run each line. A mutant
is killed where one of those fails or does not end, the quick ones first, and then the others of
their files, for what a shared fixture made: two minutes of tests at most. The share of killed
mutants is printed, and the change of each survivor: it shows a missing test, or changes nothing
that can be observed. A line that only a process runs which a test starts counts as one without a
test.
"""

import argparse
import ast
import copy
import difflib
import hashlib
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import coverage

REPOSITORY = Path(__file__).resolve().parents[1]
AREAS = (
    *("loader", "nmoe_core/base", "nmoe_core/prep", "nmoe_core/shards", "nmoe_core/sources"),
    *(
        "nmoe_core/labels",
        "nmoe_core/quality/heads",
        "nmoe_core/quality/calibration",
        "nmoe_core/quality/grading",
    ),
    *("nmoe_core/curate", "nmoe_core/engine", "nmoe_core/audit/takedown", "nmoe_core/audit/seen"),
)
TESTS = ("tests/loader", "tests/core")
_PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)]
_COMPARED = dict([*_PAIRS, *((b, a) for a, b in _PAIRS), (ast.In, ast.NotIn), (ast.NotIn, ast.In)])
_PAIRS = [(ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.BitAnd, ast.BitOr)]
_OPERATORS = dict([*_PAIRS, *((b, a) for a, b in _PAIRS), (ast.Mod, ast.Mult), (ast.Div, ast.Mult)])
_LARGEST = 64  # of the constants that are changed by one


@dataclass(frozen=True)
class Mutant:
    """A file with one change."""

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


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of a file's functions."""
    source, name = path.read_text(), path.relative_to(REPOSITORY).as_posix()
    tree, found = ast.parse(source), []
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    nodes = {id(n): n for f in functions for part in f.body for n in ast.walk(part)}
    # Pieces of an f-string have no place of their own before Python 3.12. The type of a variable of
    # a function is never computed.
    strings = [n for n in nodes.values() if isinstance(n, ast.JoinedStr)]
    types = [n.annotation for n in nodes.values() if isinstance(n, ast.AnnAssign)]
    for left_out in [*strings, *types]:
        for inner in ast.walk(left_out):
            nodes.pop(id(inner), None)
    for node in nodes.values():
        target = node.test if isinstance(node, ast.If | ast.IfExp) else node
        for change in changes_of(node):
            replaced = ast.unparse(ast.fix_missing_locations(copy.deepcopy(change())))
            text = _with(source, target, f"({replaced})")
            found.append(Mutant(name, target.lineno, text))  # pyright: ignore
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
        every = [mutant for path in files for mutant in mutants_of(path)]
        share = count // len(areas) + (i < count % len(areas))
        drawn += rng.sample(every, min(share, len(every)))
    return drawn


def digest_of_tree() -> str:
    """SHA-256 of the product and of the tests: a map of lines and tests is of these alone."""
    digest = hashlib.sha256()
    for root in ("loader", "nmoe_core", *TESTS):
        for path in sorted((REPOSITORY / root).rglob("*.py")):
            digest.update(path.relative_to(REPOSITORY).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def copied_tree(directory: Path) -> Path:
    """A copy of the files that git knows or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True).stdout
    for name in names.decode().split("\0"):
        if (REPOSITORY / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, directory / name)
    return directory


def run_tests(
    tree: Path, tests: Sequence[str], under: Sequence[str] = ("-m",), limit_s: float | None = None
) -> bool:
    """Whether tests pass in the tree, and end within the limit."""
    options = ["pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "benchmarks.reached"]
    paths = os.pathsep.join([str(tree), str(tree / "loader")])
    env = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *under, *options, *tests]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        code = subprocess.run(command, cwd=tree, env=env, timeout=limit_s, **silent).returncode
    except subprocess.TimeoutExpired:
        return False
    return code in (0, 5)  # 5: none is to run


class Reached:
    """The tests that run each line of the product, and the seconds of each test."""

    def __init__(self, most_s: float) -> None:
        self.most_s = most_s
        self.seconds: dict[str, float] = {}
        self.tests: dict[str, list[str]] = {}
        """By file and line."""

    def measure(self, tree: Path, tests: str) -> None:
        """Run the tests of a file or directory, and add what they reach."""
        under = ["-m", "coverage", "run", "--include=loader/*,nmoe_core/*", "-m"]
        if not run_tests(tree, [tests], under):
            raise SystemExit(f"{tests} fails without a mutant")
        self.seconds |= json.loads((tree / "seconds.json").read_text())
        data = coverage.CoverageData(str(tree / ".coverage"))
        data.read()
        for file in data.measured_files():
            name = Path(file).relative_to(tree).as_posix()
            for line, found in data.contexts_by_lineno(file).items():
                self.tests.setdefault(f"{name}:{line}", []).extend(filter(None, found))
        data.erase()

    def is_killed(self, tree: Path, mutant: Mutant) -> bool:
        """Whether one of the tests fails, or does not end, with the mutant in the tree."""
        reaching = set(self.tests.get(f"{mutant.file}:{mutant.line}", []))
        files = {test.partition("::")[0] for test in reaching}
        tests = sorted(reaching, key=lambda test: (self.seconds[test], test))
        beside = [test for test in self.seconds if test.partition("::")[0] in files]
        tests += [test for test in beside if test not in reaching]
        sums = accumulate(map(self.seconds.__getitem__, tests))
        chosen = [test for test, total in zip(tests, sums) if total < self.most_s]
        (tree / mutant.file).write_text(mutant.text)
        try:
            return bool(chosen) and not run_tests(tree, chosen, limit_s=60 + 5 * self.most_s)
        finally:
            shutil.copy2(REPOSITORY / mutant.file, tree / mutant.file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("areas", nargs="*", default=AREAS, help="files or directories")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--count", type=int, default=40, help="mutants over all areas")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many of them")
    parser.add_argument("--most-s", type=float, default=120, help="seconds of tests for a mutant")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument(
        "--reached", type=Path, default=Path(), help="file that keeps which tests run which line"
    )
    args = parser.parse_args()
    if unknown := [area for area in args.areas if not (REPOSITORY / area).exists()]:
        parser.error(f"there is no {unknown[0]}")
    mutants = draw(args.areas, args.seed, args.count)[args.skip :]
    parts = [
        path.relative_to(REPOSITORY).as_posix()
        for tests in TESTS
        for path in sorted((REPOSITORY / tests).iterdir())
        if path.name.startswith("test_") or (path.is_dir() and any(path.glob("test_*")))
    ]
    reached, trees, survivors = Reached(args.most_s), queue.SimpleQueue[Path](), []
    print(f"seed {args.seed}: {len(mutants)} mutants", flush=True)
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(args.processes) as pool:
        for i in range(args.processes):
            trees.put(copied_tree(Path(directory).resolve() / str(i)))

        def in_a_tree(work: Callable[..., bool | None], what: object) -> bool | None:
            tree = trees.get()
            try:
                return work(tree, what)
            finally:
                trees.put(tree)

        kept = json.loads(args.reached.read_text()) if args.reached.is_file() else [""]
        if kept[0] == (of_tree := digest_of_tree()):
            reached.seconds, reached.tests = kept[1:]
        else:
            list(pool.map(partial(in_a_tree, reached.measure), parts))
            if args.reached.name:
                args.reached.write_text(json.dumps([of_tree, reached.seconds, reached.tests]))
        print(f"{len(reached.seconds)} tests, {sum(reached.seconds.values()):.0f} s", flush=True)
        killed = pool.map(partial(in_a_tree, reached.is_killed), mutants)
        for mutant, is_killed in zip(mutants, killed):
            print("killed   " if is_killed else "SURVIVED ", f"{mutant.file}:{mutant.line}")
            if not is_killed:
                survivors.append(mutant)
                print(mutant.diff())
            sys.stdout.flush()
    num_killed = len(mutants) - len(survivors)
    print(f"{num_killed} of {len(mutants)} killed ({num_killed / max(len(mutants), 1):.0%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
