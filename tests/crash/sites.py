"""Where the product changes files, read from its code.

A site is an outermost function or method, `package.module:Class.method`, that calls a helper of
`nmoe_core.base.atomic` or `append_log`, opens a file for writing, or moves or removes one. The
helpers themselves are no sites: whoever calls them is.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tests.project import REPOSITORY

PACKAGES = ("loader", "nmoe_core", "nmoe_assets")
HELPERS = ("nmoe_core.base.atomic", "nmoe_core.base.append_log")
_OF_HELPERS = {
    *("AppendLog", "atomic_file", "clear_left", "exchange_dirs", "fsync_dir", "output_lock"),
    *("remove_leftovers", "replace_dir", "replacing", "write_bytes", "write_json", "write_jsonl"),
}
_OF_OS = {"os": {"link", "remove", "rename", "replace", "rmdir", "symlink", "truncate", "unlink"}}
_OF_SHUTIL = {"shutil": {"copy", "copy2", "copyfile", "copytree", "move", "rmtree"}}
_FUNCTIONS = _OF_OS | _OF_SHUTIL
_METHODS = {"write_bytes", "write_text", "unlink", "rmdir", "rename", "hardlink_to", "symlink_to"}
_OPENERS = {"open", "io.open", "os.fdopen", "gzip.open"}


def sites() -> set[str]:
    """Every site of the product."""
    modules = (path for name in PACKAGES for path in sorted((REPOSITORY / name).rglob("*.py")))
    return {site for path in modules for site in _sites_of(path)}


def _sites_of(path: Path) -> Iterator[str]:
    module = _module(path)
    if module in HELPERS or "build" in path.parts:
        return
    for name, body in _functions(ast.parse(path.read_text("utf-8"))):
        calls = (node for node in ast.walk(body) if isinstance(node, ast.Call))
        if any(map(_changes_files, calls)):
            yield f"{module}:{name}"


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            inner = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            yield from ((f"{node.name}.{part.name}", part) for part in inner)
        else:
            yield getattr(node, "name", "<module>"), node


def _changes_files(call: ast.Call) -> bool:
    name, method = ast.unparse(call.func), getattr(call.func, "attr", None)
    owner = name.rpartition(".")[0]
    if name in _OF_HELPERS or method in _OF_HELPERS or method in _METHODS:
        return True
    if method == "replace" and len(call.args) == 1:  # of a path; that of a text takes two
        return not call.keywords
    if method in _FUNCTIONS.get(owner, ()):
        return True
    if name in _OPENERS or method == "open":
        modes = [*call.args[:2], *(key.value for key in call.keywords if key.arg == "mode")]
        texts = (mode.value for mode in modes if isinstance(mode, ast.Constant))
        return any(re.fullmatch(r"[rbt+]*[wax+][bt+]*", str(text)) for text in texts)
    return False


def site_of(frame: FrameType | None) -> str | None:
    """The site that a call came through, from the innermost frame outwards; None where no function
    of the product is among its callers."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(REPOSITORY) and path.relative_to(REPOSITORY).parts[0] in PACKAGES:
            module = _module(path)
            if module not in HELPERS:
                return f"{module}:{frame.f_code.co_qualname.partition('.<')[0]}"
        frame = frame.f_back
    return None


def _module(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


if __name__ == "__main__":
    sys.stdout.writelines(f"{site}\n" for site in sorted(sites()))
