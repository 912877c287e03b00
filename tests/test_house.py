"""The laws of the house that no linter keeps: sizes, parameters, circles, private names."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from os.path import commonpath
from pathlib import Path

from tests.project import REPOSITORY

PACKAGES = ("loader", "nmoe", "nmoe_core", "nmoe_assets")
MODULES = [
    path
    for package in PACKAGES
    for path in sorted((REPOSITORY / package).rglob("*.py"))
    if "build" not in path.parts
]
MAX_LINES, MAX_PARAMETERS, MAX_ENTRIES = 400, 6, 15


def _name(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def test_no_file_is_over_four_hundred_lines() -> None:
    lines = {_name(path): len(path.read_text("utf-8").splitlines()) for path in MODULES}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_no_folder_has_more_than_fifteen_modules_and_folders() -> None:
    entries = [path for path in MODULES if path.name not in ("__init__.py", "__main__.py")]
    entries += [path.parent for path in MODULES if path.name == "__init__.py"]
    folders = Counter(_name(entry.parent) for entry in entries)
    assert {name: count for name, count in folders.items() if count > MAX_ENTRIES} == {}


def test_no_folders_of_one_folder_import_each_other_in_a_circle() -> None:
    known = {_module(path): path for path in MODULES}
    graph: dict[Path, set[Path]] = {}
    for path in MODULES:
        for name in _imports(path, known):
            folder = path.parent
            other = known[name].parent
            shared = len(Path(commonpath([folder, other])).parts)
            if shared < min(len(folder.parts), len(other.parts)):
                place = Path(*folder.parts[: shared + 1])
                graph.setdefault(place, set()).add(Path(*other.parts[: shared + 1]))
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_no_function_has_more_than_six_parameters() -> None:
    found = [
        f"{_name(path)}: {function.name} has {count}"
        for path in MODULES
        for function in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(function, ast.FunctionDef) and not _is_kernel(function)
        for count in [_num_parameters(function)]
        if count > MAX_PARAMETERS
    ]
    assert found == []


def test_an_assignment_has_one_value_unless_it_swaps_or_unpacks() -> None:
    found = [
        f"{_name(path)}:{assignment.lineno}: {ast.unparse(assignment)}"
        for path in MODULES
        for assignment in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(assignment, ast.Assign) and _has_unrelated_values(assignment)
    ]
    assert found == []


def _has_unrelated_values(assignment: ast.Assign) -> bool:
    """Whether several values get several names, and none reads a name that is assigned before."""
    target = assignment.targets[0]
    value = assignment.value
    if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return False
    if any(isinstance(one, ast.Starred) for one in (*target.elts, *value.elts)):
        return False
    names: set[str] = set()
    for one, given in zip(target.elts, value.elts):
        if names & {name.id for name in ast.walk(given) if isinstance(name, ast.Name)}:
            return False
        names |= {name.id for name in ast.walk(one) if isinstance(name, ast.Name)}
    return True


def test_no_modules_import_each_other_in_a_circle_not_even_for_types() -> None:
    known = {_module(path): path for path in MODULES}
    graph = {name: set(_imports(path, known)) - {name} for name, path in known.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_private_names_of_dagster_stand_in_one_file() -> None:
    imports, objects = r"^\s*(from|import) dagster[\w.]*\._", "context|instance|dg|graph|record"
    private = re.compile(rf"{imports}|\b({objects})\._[a-z]|dagster\._", re.MULTILINE)
    found = {_name(path) for path in MODULES if private.search(path.read_text("utf-8"))}
    assert found == {"nmoe_assets/dagster_private.py"}


def test_files_are_opened_for_reading_by_one_module_alone() -> None:
    """Others would wait for a pipe for ever, or read a device until memory is full."""
    own = {  # files of this package or of the system
        "loader/files/bus_errors.py",
        "loader/files/regular.py",
        "nmoe_core/cli/project/commands.py",
        "nmoe_core/engine/backend.py",
        "nmoe_core/engine/packing.py",
        "nmoe_core/prep/estimate.py",
        "nmoe_core/report/html.py",
        "nmoe_core/text/transforms/code_points.py",
    }
    found = [
        f"{_name(path)}:{call.lineno}: {ast.unparse(call)}"
        for path in MODULES
        if _name(path) not in own
        for call in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(call, ast.Call) and _reads_any_file(call)
    ]
    assert found == []


_READERS = ("np.load", "np.memmap", "np.fromfile", "safe_open", "pa.memory_map", "torch.load")
_READERS += ("pq.ParquetFile", "pq.read_schema", "pq.read_table", "zipfile.ZipFile")


def _reads_any_file(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if name == "open":
        mode = ast.unparse(call.args[1]).strip("'") if len(call.args) > 1 else "r"
        return mode.startswith("r") and "+" not in mode
    if name.endswith((".read_bytes", ".read_text")):
        return not call.args or name.endswith(".read_text")  # with an address: that of a store
    return (
        name in _READERS
        and ast.unparse(call.args[0]) not in ("stream", "io")
        and not (ast.unparse(call.args[0]).startswith("regular("))
    )


def test_no_array_is_written_through_buffers_of_c_which_hide_a_full_disk() -> None:
    found = [
        f"{_name(path)}: {line.strip()}"
        for path in MODULES
        for line in path.read_text("utf-8").splitlines()
        if re.search(r"\.tofile\(|np\.savez?\((?!payload)", line)
    ]
    assert found == []


def test_no_work_is_put_off_in_a_comment() -> None:
    marks = ("TODO", "FIXME", "XXX")
    texts = {_name(path): path.read_text("utf-8") for path in MODULES}
    assert [name for name, text in texts.items() if any(mark in text for mark in marks)] == []


def _is_kernel(function: ast.FunctionDef) -> bool:
    """Triton's kernels take their shapes and strides one by one."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _num_parameters(function: ast.FunctionDef) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in named)


def _module(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [name for name in names if name in known]
            yield from modules
            if len(modules) < len(names) and node.module in known:
                yield node.module
