"""A loader for this process, and batches and rows in the forms that trainers take."""

import copy
import pickle
import sys
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest

from loader import cu_seqlens, open_loader, position_ids, resolve_plan
from loader.ranks import data_rank
from tests.refusals import refused

IGNORED = -100


@pytest.fixture
def cfg(two_stages):
    return two_stages.cfg


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        ((2, 4), {"RANK": "0", "WORLD_SIZE": "8"}, (2, 4)),
        ((None, None), {"RANK": "3", "WORLD_SIZE": "8", "SLURM_NTASKS": "2"}, (3, 8)),
        ((None, None), {}, (0, 1)),
        ((None, None), {"SLURM_NTASKS": "1"}, (0, 1)),
    ],
)
def test_the_rank_is_that_of_the_arguments_or_else_of_the_environment(given, environ, expected):
    assert data_rank(*given, environ=environ) == expected


@pytest.mark.parametrize(
    ("given", "environ", "named"),
    [
        ((1, None), {}, "rank = 1, world_size = None"),
        ((None, 4), {"RANK": "1", "WORLD_SIZE": "4"}, "rank = None, world_size = 4"),
        ((None, None), {"RANK": "1"}, "RANK = '1'"),
        ((None, None), {"RANK": "one", "WORLD_SIZE": "4"}, "RANK = 'one'"),
        ((None, None), {"SLURM_NTASKS": "8"}, "SLURM_NTASKS = '8'"),
        ((None, None), {"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE = '2'"),
        ((None, None), {"HOROVOD_SIZE": "2"}, "HOROVOD_SIZE = '2'"),
        ((None, None), {"MV2_COMM_WORLD_SIZE": "2"}, "MV2_COMM_WORLD_SIZE = '2'"),
    ],
)
def test_a_rank_is_never_guessed(given, environ, named):
    with refused("E-CONFIG", match="the rank of this process is unknown", naming=[named]):
        data_rank(*given, environ=environ)


def test_the_rank_of_torch_distributed_comes_before_the_environment(tmp_path):
    dist = pytest.importorskip("torch.distributed")
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        assert data_rank(environ={"RANK": "3", "WORLD_SIZE": "8"}) == (0, 1)
    finally:
        dist.destroy_process_group()


class Jax:
    """JAX, of which two processes are initialised or not."""

    def __init__(self, is_initialized: bool) -> None:
        self.distributed = SimpleNamespace(is_initialized=lambda: is_initialized)

    def process_index(self) -> int:
        return 1

    def process_count(self) -> int:
        return 2


def test_the_rank_of_jax_is_found_where_its_processes_are_up(cfg, monkeypatch):
    early = open_loader(cfg, backend="numpy")
    for is_initialized, expected in ((False, (0, 1)), (True, (1, 2))):
        monkeypatch.setitem(sys.modules, "jax", Jax(is_initialized))
        opened = open_loader(cfg, backend="numpy")
        assert (opened.rank, opened.world_size) == expected
    assert data_rank(0, 4) == (0, 4)
    with refused("E-CONFIG", naming=["before torch.distributed or JAX was initialised"]):
        early.next()


def test_ranks_of_torch_and_of_jax_that_differ_are_refused(tmp_path, monkeypatch):
    dist = pytest.importorskip("torch.distributed")
    monkeypatch.setitem(sys.modules, "jax", Jax(True))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with refused("E-CONFIG", naming=["torch.distributed = (0, 1), JAX = (1, 2)"]):
            data_rank()
        assert data_rank(0, 4) == (0, 4)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_dict_fits_models_that_shift_labels_themselves(cfg, backend, packing):
    if backend == "torch":
        pytest.importorskip("torch")
    keys = {"backend": backend, "rank": 1, "world_size": 2}
    settings = cfg | {"packing": packing}
    plain = open_loader(settings, **keys)
    extras = ("position_ids", "cu_seqlens")
    opened = open_loader(settings, form="dict", extras=extras, **keys)
    for batch, _ in zip(opened, range(3)):
        meta = plain.next_with_meta()
        varlen = ["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"]
        assert list(batch) == ["input_ids", "labels", "shift_labels", "position_ids", *varlen]
        own = {name: np.asarray(part) for name, part in batch.items()}
        targets, spans = np.asarray(meta.targets), meta.document_spans or ()
        assert (own["input_ids"] == np.asarray(meta.inputs)).all()
        assert (own["shift_labels"] == targets).all()
        assert (own["labels"][:, 1:] == targets[:, :-1]).all()
        assert (own["labels"][:, 0] == IGNORED).all()
        assert (own["position_ids"] == position_ids(spans, 16)).all()
        assert (own["cu_seq_lens_q"] == cu_seqlens(spans, 16)).all()


def test_batches_are_copied_to_the_device_that_is_named(cfg):
    pytest.importorskip("torch")
    opened = open_loader(cfg, form="dict", extras=("position_ids",), device="meta")
    assert {part.device.type for part in opened.next().values()} == {"meta"}
    opened = open_loader(cfg, device="meta")
    batch = opened.next_with_meta()
    assert {part.device.type for part in (*opened.next(), batch.inputs)} == {"meta"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"form": "list"}, "unknown form"),
        ({"form": "dict", "extras": ("position_id",)}, "did you mean 'position_ids'?"),
        ({"extras": ("cu_seqlens",)}, "extras need form = 'dict'"),
        ({"form": "dict", "dtype": "uint32"}, "labels, contain -100"),
        ({"device": "cpu", "backend": "numpy"}, "pin_memory and device need torch"),
        ({"device": "nowhere"}, "device: this process has no such device"),
        ({"batch_size": 4}, "a setting of the run, not an argument of the loader"),
        ({"shuffle": True}, 'read_config("run.toml") | {"shuffle": ...}'),
        ({"num_workers": 4, "backend": "numpy"}, "num_workers needs torch"),
        ({"prefech": 2}, "did you mean 'prefetch'?"),
    ],
)
def test_options_that_do_not_fit_are_refused(cfg, options, named):
    if options.get("backend") != "numpy":
        pytest.importorskip("torch")
    with refused("E-CONFIG", naming=[named]):
        open_loader(cfg, **options)


def test_a_directory_is_named_as_data(two_stages):
    with refused("E-CONFIG", naming=["a directory", '{"data_path": ']):
        open_loader(two_stages.tree.root / "web")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_loader_cannot_be_copied_and_names_what_to_send(cfg, copied, prefetch):
    with open_loader(cfg, prefetch=prefetch) as opened, refused("E-CONFIG", naming=["state_dict"]):
        copied(opened)


def test_without_torch_batches_are_arrays_and_a_request_for_torch_is_refused(cfg, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert isinstance(open_loader(cfg).next()[0], np.ndarray)
    with refused("E-CONFIG", naming=["torch is not installed"]):
        open_loader(cfg, backend="torch")


def test_extras_need_an_index_of_documents(tree):
    tree.add("web", 900).unlink()
    cfg = tree.one(steps=4, allow_unmanifested=True)
    with refused("E-CONFIG", naming=["no document index"]):
        open_loader(cfg, backend="numpy", form="dict", extras=("position_ids",))


def test_a_loader_says_in_one_line_where_it_is(cfg):
    opened = open_loader(cfg, rank=1, world_size=5, backend="numpy")
    opened.next()
    assert repr(opened) == (
        f"<Loader of train, plan mix:test {opened.plan.plan_hash[:12]}: step 1 of 33, rank 1 of 5 "
        "(3 of 12 rows of 16 tokens), web, code, math>"
    )


@pytest.mark.parametrize("split", ["train", "valid"])
def test_an_index_is_a_step_or_a_row_of_the_run(cfg, split):
    pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    from loader.torch_data import RowDataset, StepDataset

    plan = resolve_plan(cfg)
    whole = [np.asarray(batch[0]) for batch in open_loader(plan, split=split)]
    steps = StepDataset(plan, split=split)
    made = list(DataLoader(steps, batch_size=None, num_workers=2))
    assert len(steps) == len(made) == len(whole)
    assert all((a[0].numpy() == b).all() for a, b in zip(made, whole))
    rows = np.concatenate(whole)
    data = pickle.loads(pickle.dumps(RowDataset(plan, split)))
    assert len(data) == len(rows)
    batches = DataLoader(data, batch_size=5, num_workers=1)
    read = np.concatenate([batch["input_ids"].numpy() for batch in batches])
    assert (read == rows).all()
    order = [0, 1, 4, 7, 8]
    assert (np.stack([row["input_ids"] for row in data.__getitems__(order)]) == rows[order]).all()
    pair = RowDataset(plan, split, form="pair")[2]
    assert (pair[0].numpy() == rows[2]).all()
    for outside in (-1, len(data)):
        with pytest.raises(IndexError):
            data[outside]
    with pytest.raises(IndexError):
        steps[len(steps)]


def test_rows_of_ranks_that_a_trainer_cuts_are_the_plans_batch(cfg):
    pytest.importorskip("torch")
    from loader.torch_data import RowDataset, StepDataset

    data, plan = RowDataset(cfg), resolve_plan(cfg)
    step = chain.from_iterable(StepDataset(plan, rank, 3)[4][0] for rank in range(3))
    for row, expected in zip(range(48, 60), step, strict=True):
        assert (data[row]["input_ids"] == expected).all()
    with refused("E-CONFIG", naming=["describes a batch, not a row"]):
        RowDataset(cfg, extras=("cu_seqlens",))
    with refused("E-CONFIG", naming=["read_rows cannot be used with prefetch"]):
        open_loader(cfg, prefetch=2, backend="numpy").read_rows(0, 2)
