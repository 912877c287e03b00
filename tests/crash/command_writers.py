"""The writers that are commands on a project with all tasks done: plans made of plans, takedowns,
questions to the oracle and to readers, parts of `nmoe curate`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from loader import resolve_plan
from loader.files.format import read_json_object
from loader.plan.file import load_plan
from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import read_sealed, sha256_file
from nmoe_core.curate.takedown.record import read_rows
from tests.crash.other_writers import checkpoint_of, grow, grow_shards
from tests.crash.project import nmoe, run_task
from tests.crash.writers import Views, Writer, tree_of, whole_shards

_SPLIT = "out/data/web/train"
# The symptom is there until the document of some 20 tokens that begins at token 0 is masked.
_REPLAY = """grep -q '"start": 0,' "$1" && echo 0 || echo 1"""


def _one(read: Callable[[Path], object], **options: object) -> Callable[[Path], Views]:
    return lambda project: {"made": partial(read, project)}


def _there(path: Path) -> str:
    """Digest of a file; FormatError where there is none."""
    if not path.is_file():
        raise FormatError("no file", where=path)
    return sha256_file(path)


def _on_run(words: str, project: Path, *more: object) -> int:
    return nmoe(words, *more, "--config", project / "run.toml")


def _as_it_is(project: Path) -> None:
    """Nothing was made before."""


def _prep(project: Path) -> int:
    flags = ["--paths", project / "in/web.jsonl", "--output", project / "own", "--num-shards", 2]
    return nmoe("prep --source jsonl --name own", *flags)


def _own_plan(project: Path) -> Path:
    """A plan over the raw shards."""
    path = project / "own_plan.json"
    rows = [{"path": str(project / _SPLIT), "weight": 1}]
    plan = resolve_plan({"datasets": rows, "batch_size": 2, "seq_len": 64})
    path.write_text(plan.placed_in(project).to_json())
    return path


def _twin(project: Path) -> int:
    flags = ["--source", f"train={project / _SPLIT}", "--seq-len", (project / "length").read_text()]
    return nmoe("twin", project / "own_plan.json", *flags, "-o", project / "twin.json")


def _twinned(project: Path) -> None:
    _own_plan(project)
    (project / "length").write_text("200")
    assert _twin(project) == 0
    (project / "length").write_text("300")


def _bisect(project: Path) -> int:
    command = f"sh {project / 'replay.sh'} {{plan}}"
    flags = ["--from-step", 0, "--to-step", 3, "--above", 0.5, "--command", command]
    return nmoe("bisect", project / "own_plan.json", *flags, "-o", project / "bisection")


def _bisectable(project: Path) -> None:
    _own_plan(project)
    (project / "replay.sh").write_text(_REPLAY)


def _audit(project: Path) -> int:
    return _on_run("hydra audit --documents 40", project)


def _publish(project: Path) -> int:
    return nmoe("publish", project / _SPLIT / "manifest.json", f"file://{project / 'store'}")


def _published(project: Path) -> object:
    return whole_shards(project / "store" / "manifest.json")


def _list(project: Path, *ids: str) -> Path:
    path = project / "gone.txt"
    path.write_text("".join(f"id:{one}\n" for one in ids))
    return path


def _apply(project: Path) -> int:
    return _on_run("takedown --apply --erase-labels", project, project / "gone.txt")


def _applied(project: Path) -> None:
    _list(project, "d40")
    assert _apply(project) == 0
    _list(project, "d40", "d41", "d42")


def _mask(project: Path) -> int:
    flags = ["--mask", tree_of(project).plan, "-o", project / "masked.json"]
    return _on_run("takedown", project, project / "gone.txt", *flags)


def _masked(project: Path) -> None:
    _list(project, "d40")
    assert _mask(project) == 0
    _list(project, "d40", "d41", "d42")


def _prove(project: Path) -> int:
    return _on_run("takedown --verify --allow-shared", project, project / "gone.txt")


def _provable(project: Path) -> None:
    _list(project, "d40", "d41")
    assert _apply(project) == 0
    assert run_task(project, "curate shards") == 0


def _index(project: Path) -> int:
    return _on_run("seen --index", project)


def _indexes(project: Path) -> Views:
    shards = tree_of(project).shards("web", 2)
    return {s.name: lambda s=s: read_sealed(s.seen_index) for s in shards}


def _ablate(project: Path) -> int:
    """With steps of a few bytes, of which the small texts have enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nmoe_core.tasks.ablate.result._MIN_STEPS", 2)
        patch.setattr("nmoe_core.tasks.ablate.result.BATCH", 2)
        return _on_run("ablate --tokens 400 --documents 12", project)


def _ablatable(project: Path) -> None:
    path = project / "run.toml"
    path.write_text(path.read_text().replace("n_words > 5", "n_words > 15"))
    assert run_task(project, "curate shards") == 0


def _pickled(project: Path) -> None:
    import torch  # which other writers need not load

    gate = torch.nn.Linear(64, 1)
    torch.nn.init.constant_(gate.weight, 0.5)
    torch.nn.init.zeros_(gate.bias)
    tensors = {f"gate.{name}": value for name, value in gate.state_dict().items()}
    tensors["domain.weight"], tensors["domain.bias"] = torch.zeros(9, 64), torch.zeros(9)
    torch.save(tensors, project / "head.pt")


def _import(project: Path) -> int:
    flags = [project / "head.pt", "--out", project / "heads", "--checkpoint"]
    return nmoe("train import-pt", *flags, checkpoint_of(project))


def _file_flags(project: Path) -> list[object]:
    return ["--input", project / "in/web.jsonl", "--model-dir", checkpoint_of(project)]


def _find_k(project: Path) -> int:
    flags = ["--output", project / "k.jsonl", "--n-clusters", 4, "--no-plot"]
    return nmoe("curate calibrate-k", *_file_flags(project), *flags)


def _embed(project: Path) -> int:
    flags = ["--output", project / "deep.npy", "--limit", 40, "--batch-size", 8]
    return nmoe("curate embed", *_file_flags(project), *flags)


def _arrays(project: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("shallow", "deep"):
        np.save(project / f"{name}.npy", rng.normal(size=(60, 8)).astype(np.float32))
    np.save(project / "order.npy", rng.permutation(60))
    np.save(project / "labels.npy", rng.integers(0, 4, 60))
    np.save(project / "counts.npy", rng.integers(5, 50, 60))


def _compare(project: Path) -> int:
    flags = ["--deep", project / "deep.npy", "--plot", project / "compared.png", "--n-clusters", 4]
    return nmoe("curate compare --shallow", project / "shallow.npy", *flags)


def _animate(project: Path) -> int:
    names = {"embeddings": "shallow", "token-counts": "counts", "order": "order"}
    flags = [
        f"--{flag}={project / name}.npy" for flag, name in (names | {"labels": "labels"}).items()
    ]
    flags += ["--frames=3", "--n-clusters=4", "--seq-len=200", f"--output={project / 'film.gif'}"]
    return nmoe("curate animate", *flags)


def _file(name: str) -> Callable[[Path], Views]:
    return _one(lambda project: _there(project / name))


def _plan_at(name: str) -> Callable[[Path], Views]:
    return _one(lambda project: load_plan(project / name).plan_hash)


def _heavy(
    run: Callable[[Path], int],
    read: Callable[[Path], Views],
    begin: Callable[[Path], object] = _as_it_is,
    has_gap: bool = False,
    ignored: tuple[str, ...] = (),
) -> Writer:
    return Writer(run, read, begin, has_gap, ignored, is_heavy=True)


def _prepared(project: Path) -> None:
    assert _prep(project) == 0
    grow(project)


COMMAND_WRITERS = {
    "prep": _heavy(_prep, _one(lambda p: whole_shards(p / "own" / "manifest.json")), _prepared),
    "twin": _heavy(_twin, _plan_at("twin.json"), _twinned),
    "bisect": _heavy(
        _bisect,
        _one(lambda project: read_json_object(project / "bisection" / "causes.json")),
        _bisectable,
    ),
    # Labels without a summary are those of an audit that is under way.
    "hydra audit": _heavy(_audit, _file("out/labels/audit/web/summary.json"), has_gap=True),
    "takedown --apply": _heavy(
        _apply, _one(lambda project: len(read_rows(tree_of(project)))), _applied
    ),
    "takedown --verify": _heavy(_prove, _file("out/takedown/proof.json"), _provable),
    "takedown --mask": _heavy(_mask, _plan_at("masked.json"), _masked),
    "seen --index": _heavy(_index, _indexes),
    "ablate": _heavy(_ablate, _file("out/ablation.json"), _ablatable),
    "train import-pt": _heavy(_import, _file("heads/hydra_probe.safetensors"), _pickled),
    "curate calibrate-k": _heavy(_find_k, _file("k_calibrate_k.json")),
    # Beside the array stands how many records the last run embedded.
    "curate embed": _heavy(_embed, _file("deep.npy"), ignored=("deep_meta.json",)),
    "curate compare": _heavy(_compare, _file("compared.png"), _arrays),
    "curate animate": _heavy(_animate, _file("film.gif"), _arrays),
}


def _sent_before(project: Path) -> None:
    assert _publish(project) == 0
    grow_shards(project)


SENT_WRITERS = {
    "publish": _heavy(
        _publish,
        _one(_published),
        _sent_before,
        has_gap=True,
        ignored=("publication.json",),  # with the store's marks, which hold times
    )
}
"""Files that they write are written by a library of another language: only signals disturb them."""
