"""What a batch knows of its rows comes in every form, and keeps documents apart in a model."""

import itertools
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from loader import attention_mask, document_ids, open_loader, position_ids, resolve_plan
from tests.refusals import refused

pytest.importorskip("torch")

import torch
from torch.utils.data import DataLoader

from loader.torch_data import RowDataset, StepDataset

PHASES = [{"start_step": 4, "dataset_weights": {"math": 4}, "lr_scale": 0.5}]
OF_ROWS = ("source_index", "stage_index", "sequence_index", "lr_scale")
OF_TOKENS = ("position_ids", "document_ids", "attention_mask")
VARLEN = ["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"]


@pytest.fixture(params=["concat", "best_fit"])
def plan(two_stages, request) -> Any:
    return resolve_plan(two_stages.cfg | {"packing": request.param, "phases": PHASES})


def check_record(batch: Any, other: Any) -> None:
    """A batch in the form `batch` is another one."""
    assert tuple(batch.source_names) == other.source_names  # DataLoader makes lists of tuples
    assert batch.lr_scale == other.lr_scale
    assert batch.global_sequence_index == other.global_sequence_index
    for name in ("inputs", "targets", "source_index", "stage_index", "sequence_index"):
        assert (np.asarray(getattr(batch, name)) == np.asarray(getattr(other, name))).all(), name
    for one, two in zip(batch.document_spans, other.document_spans, strict=True):
        assert (np.asarray(one) == two).all()


def check_dict(batch: dict[str, Any], other: Any, extras: tuple[str, ...]) -> None:
    """A batch in the form `dict` says what the record says."""
    assert (batch["input_ids"] == other.inputs).all()
    for name in OF_ROWS[:3]:
        assert (batch[name].numpy() == getattr(other, name)).all()
    assert batch["lr_scale"].tolist() == [other.lr_scale] * len(other.inputs)
    numbers = document_ids(other.document_spans, 16)
    assert (batch["position_ids"].numpy() == position_ids(other.document_spans, 16)).all()
    assert (batch["document_ids"].numpy() == numbers).all()
    assert (batch["attention_mask"].numpy() == attention_mask(numbers)).all()
    if "cu_seqlens" in extras:
        lengths = []
        for spans in other.document_spans:
            lengths += (spans[:, 1] - spans[:, 0]).tolist()
            lengths += [16 - int(spans[-1, 1])] * bool(spans[-1, 1] < 16)
        for key in ("q", "k"):
            assert batch[f"cu_seq_lens_{key}"].tolist() == [0, *itertools.accumulate(lengths)]
            assert batch[f"cu_seq_lens_{key}"].dtype == torch.int32
            assert batch[f"max_length_{key}"] == max(lengths)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_all_that_give_batches_say_what_they_hold(plan, split):
    keys: dict[str, Any] = {"rank": 1, "world_size": 2}
    plain = open_loader(plan, split, **keys)
    whole = [plain.next_with_meta() for _ in range(len(plain))]
    assert {stage for batch in whole for stage in batch.stage_index.tolist()} == (
        {0, 1, 2} if split == "train" else {-1}
    )
    if split == "train":
        names = [stage.name for stage in plan.stages]
        assert names[whole[4].stage_index[0]] == "pretrain@4"
        assert [whole[step].lr_scale for step in (3, 4)] == [1.0, 0.5]
    extras = (*OF_ROWS, *OF_TOKENS, "cu_seqlens")
    forms: list[dict[str, Any]] = [{"form": "batch"}, {"form": "dict", "extras": extras}]
    for given in forms:
        steps = StepDataset(plan, 1, 2, split, **given)
        for batches in (
            open_loader(plan, split, **keys, **given),
            open_loader(plan, split, prefetch=2, **keys, **given),
            DataLoader(steps, batch_size=None),
            DataLoader(steps, batch_size=None, num_workers=1),
            open_loader(plan, split, num_workers=1, **keys, **given),
        ):
            for batch, other in zip(batches, whole, strict=True):
                if given["form"] == "batch":
                    check_record(batch, other)
                else:
                    check_dict(batch, other, extras)
                    assert list(batch)[3:] == [*OF_ROWS, *OF_TOKENS, *VARLEN]


def test_rows_say_what_they_hold_in_any_batches(plan):
    plain = open_loader(plan, rank=0, world_size=1)
    extras = (*OF_ROWS, *OF_TOKENS)
    for batch in DataLoader(RowDataset(plan, extras=extras), plan.batch_size):
        check_dict(batch, plain.next_with_meta(), extras)
    rows = DataLoader(RowDataset(plan, extras=extras), 5)  # over the borders of steps
    scales = torch.cat([batch["lr_scale"] for batch in rows]).tolist()
    assert scales == [plain.lr_scale(row // 12) for row in range(len(scales))]
    with refused("E-CONFIG", naming=["describes a batch, not a row", "extras"]):
        RowDataset(plan, form="batch")


def test_facts_of_rows_need_no_index_of_documents(tree):
    tree.add("web", 900).unlink()
    cfg = tree.one(steps=4, allow_unmanifested=True)
    batch = open_loader(cfg, form="dict", extras=OF_ROWS).next()
    assert batch["sequence_index"].tolist() == [0, 1]
    assert open_loader(cfg, form="batch").next().document_spans is None


def test_attention_stays_inside_documents_and_looks_back_only():
    ids = document_ids([np.array([[0, 3], [3, 5]]), np.array([[0, 2]])], 6)
    for numbers in (ids, torch.from_numpy(ids)):
        mask = attention_mask(numbers)
        assert type(mask) is type(numbers)
        assert mask.shape == (2, 1, 6, 6)
        for row, owner in enumerate(ids.tolist()):
            for i, j in itertools.product(range(6), range(6)):
                allowed = i == j or (j <= i and owner[i] == owner[j] != -1)
                assert mask[row, 0, i, j] == (0 if allowed else np.finfo(np.float32).min)


# In a model of transformers


def varlen_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **given: Any) -> Any:
    """Attention of flat rows, from the arguments that transformers passes to flash attention."""
    assert mask is None
    edges = given["cu_seq_lens_q"].tolist()
    assert edges == given["cu_seq_lens_k"].tolist()
    longest = max(end - start for start, end in itertools.pairwise(edges))
    assert given["max_length_q"] == given["max_length_k"] == longest
    flat = [part.transpose(0, 1).flatten(1, 2) for part in (query, key, value)]  # heads first
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(part[:, start:end] for part in flat), is_causal=True, scale=given["scaling"]
        )
        for start, end in itertools.pairwise(edges)
    ]
    rows = torch.cat(parts, 1).unflatten(1, (len(query), -1))
    return rows.permute(1, 2, 0, 3), None


WAYS: dict[str, dict[str, Any]] = {
    "eager": {"extras": ("position_ids", "attention_mask")},
    "sdpa": {"extras": ("position_ids", "attention_mask")},
    "eager, by positions": {"extras": ("position_ids",), "use_cache": False},
    "sdpa, by positions": {"extras": ("position_ids",), "use_cache": False},
    "varlen": {"extras": ("position_ids", "cu_seqlens")},
}


@pytest.mark.long  # imports transformers
@pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not installed")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_model_learns_packed_documents_as_it_learns_each_alone(two_stages, way, packing):
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    AttentionInterface.register("varlen", varlen_attention)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        attn_implementation=way.split(",")[0],
    )
    model = LlamaForCausalLM(config)

    def learn(logits: Any, targets: Any) -> None:
        flat = logits.flatten(0, 1), targets.flatten()
        torch.nn.functional.cross_entropy(*flat, reduction="sum").backward()

    def gradients() -> list[Any]:
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return found

    cfg = two_stages.cfg | {"packing": packing, "seq_len": 64, "batch_size": 4}
    given = {**WAYS[way]}
    extras = given.pop("extras")
    batch = open_loader(cfg, form="dict", extras=extras).next()
    record = open_loader(cfg, form="batch").next()
    targets = batch.pop("shift_labels")
    del batch["labels"]
    learn(model(**batch, **given).logits, targets)
    packed = gradients()
    model.set_attn_implementation("sdpa")
    num_documents = 0
    for inputs, expected, spans in zip(record.inputs, record.targets, record.document_spans):
        for start, end in spans.tolist():
            logits = model(input_ids=inputs[None, start:end]).logits
            learn(logits, expected[None, start:end])
            num_documents += 1
    assert num_documents > 8
    for one, other in zip(packed, gradients(), strict=True):
        assert (one - other).abs().max() <= 1e-5 * max(1.0, float(other.abs().max()))
