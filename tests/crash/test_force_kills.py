"""Kill a forced prep at each of its steps: the whole old version is there, or the whole new one."""

import json
import os
import sys
from pathlib import Path

import pytest

from nmoe_core.base.atomic import output_lock
from nmoe_core.prep.incremental import existing
from nmoe_core.prep.run import PrepSettings, prep_shards, write_manifest
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.records import Reading, Split
from tests.project import failing, json_lines, output_of

# One process loads the tokenizer and forks a run for every step that a run can be killed at.
RUN = """
import json, os, shutil, sys
from pathlib import Path
from loader.files.format import load_manifest
from nmoe_core.prep.incremental import existing
from nmoe_core.prep.run import PrepSettings, prep_shards, write_manifest
from nmoe_core.shards.verify import verify_manifest
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.records import Reading, Split

root, step, exchange = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if exchange == "without":
    existing.exchange_dirs = lambda staged, final: False

def prep(name, out, existing, num_shards=2):
    settings = PrepSettings(name="web", num_shards=num_shards)
    source = JsonlSource(Reading("web"), find_files([name], root))
    prep_shards(Split(source), settings, out, existing=existing)
    write_manifest(settings, out)

def content(out):
    path = out / "manifest.json"
    if not path.exists():
        return None
    manifest = load_manifest(path)
    assert not verify_manifest(manifest, checksums=True, deep=True)
    return manifest.extra["content_hash"]

prep("old.jsonl", root / "old", "grow", 3)
prep("new.jsonl", root / "new", "grow")
named = {content(root / "old"): "old", content(root / "new"): "new", None: "none"}
assert len(named) == 3
found, k, status = [], 0, 9
while status:
    k += 1
    out = root / step / str(k)
    shutil.copytree(root / "old", out)
    (out / "notes").mkdir()
    (out / "notes" / "mine").write_text("mine")
    child = os.fork()
    if not child:
        os.environ["NMOE_FAILPOINT"] = f"{step}:{k}:kill"
        prep("new.jsonl", out, "remake")
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, 9), status
    left = named[content(out)]
    prep("new.jsonl", out, "update" if k % 2 else "remake")
    assert named[content(out)] == "new"
    assert (out / "notes" / "mine").read_text() == "mine"
    beside = sorted(p.name for p in out.parent.iterdir() if p.name.startswith(f".{k}."))
    assert beside == [f".{k}.versions"], beside
    assert [named[content(path)] for path in (out.parent / beside[0]).iterdir()] == ["old"]
    assert sorted(p.name for p in out.iterdir() if p.name != "notes") == [
        "manifest.json", "shard_0000", "shard_0001"]
    found.append(left)
print(json.dumps(found))
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, word in (("old", "shard"), ("new", "token")):
        rows = [{"id": f"d{i}", "text": f"one {word} of many tokens " * 4} for i in range(40)]
        (tmp_path / f"{name}.jsonl").write_text(json_lines(rows))
    return tmp_path


def _versions_left(root: Path, step: str, exchange: str = "with") -> list[str]:
    """What was readable after a kill at the first, second... step, up to a run that none ended."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "0"}
    return json.loads(output_of(sys.executable, "-c", RUN, root, step, exchange, env=environment))


_SLOW = [pytest.param(step, marks=pytest.mark.slow) for step in ("write", "fsync")]


@pytest.mark.parametrize("step", ["rename", *_SLOW])
def test_a_kill_at_any_step_of_a_forced_run_leaves_one_whole_version(root: Path, step: str) -> None:
    left = _versions_left(root, step)
    assert len(left) > 5
    assert set(left) == {"old", "new"}
    assert left == sorted(left, reverse=True)  # the old one up to one step, then the new one


def test_without_an_exchange_no_kill_leaves_a_mixture(root: Path) -> None:
    left = _versions_left(root, "rename", "without")
    assert set(left) == {"old", "none", "new"}
    assert "".join(dict.fromkeys(left)) == "oldnonenew"


def test_a_split_on_another_file_system_is_replaced_by_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = tmp_path / "train"
    for version, place in (("old", split), ("new", existing.directory_beside(split))):
        for name in ("shard_0000", "shard_0001", "shard_0002", "."):
            (place / name).mkdir(parents=True, exist_ok=True)
            (place / name / "manifest.json").write_text(version)
    monkeypatch.setattr(existing, "exchange_dirs", lambda staged, final: False)
    with failing("rename:1:EXDEV"), output_lock(split):
        existing.swap_in(split)
    assert [path.read_text() for path in split.rglob("manifest.json")] == ["new"] * 4
    assert {p.name for p in split.iterdir() if p.name.startswith(".")} == set()


def test_a_split_that_is_a_link_stays_one_when_it_is_replaced(root: Path) -> None:
    target, split = root / "disk" / "train", root / "web" / "train"
    target.mkdir(parents=True)
    split.parent.mkdir()
    split.symlink_to(target)
    settings = PrepSettings(name="web", num_shards=2)
    for name in ("old", "new"):
        source = JsonlSource(Reading("web"), find_files([f"{name}.jsonl"], root))
        prep_shards(Split(source), settings, split, existing="remake")
        manifest, _ = write_manifest(settings, split)
    assert split.is_symlink()
    assert json.loads((target / "manifest.json").read_text()) == manifest
    assert [p.name for p in split.parent.iterdir()] == ["train"]
    assert sorted(p.name for p in target.parent.iterdir()) == [".train.versions", "train"]
