"""Attention, rotation and norm kernels against plain torch, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nmoe_core.engine.kernels import decode_attention as decode
from nmoe_core.engine.kernels import prefill_attention as prefill
from nmoe_core.engine.kernels.rows import add_rms_norm, rotate_and_store
from nmoe_core.engine.rope import rotate

HEADS, KV_HEADS, DIM = 4, 2, 16


def attend(q, k, v, sinks, window):
    """One query [heads, D] at the last of the keys [T, kv_heads, D], in float64."""
    length = len(k)
    seen = slice(0 if window is None else max(0, length - window), length)
    group = q.shape[0] // k.shape[1]
    k, v = (x[seen].double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("hd,thd->ht", q.double(), k) * q.shape[1] ** -0.5
    weights = torch.cat([scores, sinks.double()[:, None]], 1).softmax(1)[:, :-1]
    return torch.einsum("ht,thd->hd", weights, v)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(prefill, "QUERY_BLOCK", 16)
    monkeypatch.setattr(prefill, "KEY_BLOCK", 16)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("window", [None, 1, 15, 16, 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_documents_attend_to_themselves_alone(window, dtype):
    lengths = [1, 0, 35] if dtype == torch.float32 else [18]
    num_rows = sum(lengths)
    q = random(num_rows, HEADS, DIM, seed=1, dtype=dtype)
    k = random(num_rows, KV_HEADS, DIM, seed=2, dtype=dtype)
    v = random(num_rows, KV_HEADS, DIM, seed=3, dtype=dtype)
    sinks = random(HEADS, seed=4)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    blocks = prefill.query_blocks(starts, num_rows)
    found = prefill.prefill_attention(q, k, v, sinks, blocks, window)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for start, length in zip(starts.tolist(), lengths, strict=False):
        for i in range(start, start + length):
            expected = attend(q[i], k[start : i + 1], v[start : i + 1], sinks, window)
            torch.testing.assert_close(found[i].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("window", [None, 10])
def test_the_last_queries_of_a_document_see_keys_from_before_them(window):
    counts, key_counts = [3, 20], [40, 20]
    starts, key_starts = (torch.tensor([0, *c]).cumsum(0).int() for c in (counts, key_counts))
    q = random(sum(counts), HEADS, DIM, seed=1)
    k, v = (random(sum(key_counts), KV_HEADS, DIM, seed=s) for s in (2, 3))
    sinks = random(HEADS, seed=4)
    blocks = prefill.query_blocks(starts, len(q))
    found = prefill.prefill_attention(
        q, k, v, sinks, replace(blocks, key_starts=key_starts), window
    )
    for document, count in enumerate(counts):
        first_key = int(key_starts[document])
        for i in range(count):
            stop = int(key_starts[document + 1]) - count + i + 1
            expected = attend(
                q[starts[document] + i], k[first_key:stop], v[first_key:stop], sinks, window
            )
            torch.testing.assert_close(
                found[starts[document] + i].double(), expected, rtol=1e-5, atol=1e-5
            )


@pytest.mark.usefixtures("small_blocks")
def test_query_blocks_cover_every_document_once():
    lengths = [5, 0, 16, 33]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    blocks = prefill.query_blocks(starts, sum(lengths))
    pairs = list(zip(blocks.documents.tolist(), blocks.firsts.tolist(), strict=True))
    assert [p for p in pairs if p[0] >= 0] == [(0, 0), (2, 0), (3, 0), (3, 16), (3, 32)]


def paged(values, lengths, page_size, width, seed):
    """Pages in a random order that hold each sequence's rows, and the block tables."""
    num_pages = len(lengths) * width + 3
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    pages = torch.full((num_pages, page_size, *values[0].shape[1:]), 1e4).to(values[0].dtype)
    tables = order[: len(lengths) * width].view(len(lengths), width).int()
    for rows, table in zip(values, tables, strict=True):
        for position, row in enumerate(rows):
            pages[table[position // page_size % width], position % page_size] = row
    return pages, tables


@pytest.mark.parametrize(
    ("window", "lengths", "width"),
    [(None, (1, 40, 0, 23), 6), (16, (15, 16, 17, 90), 3), (None, (70,), 9)],
)
def test_decoding_reads_the_pages_of_each_sequence(monkeypatch, window, lengths, width):
    monkeypatch.setattr(decode, "SPLIT_KEYS", 32)
    monkeypatch.setattr(decode, "KEY_BLOCK", 16)
    keys = [random(n, KV_HEADS, DIM, seed=n) for n in lengths]
    values = [random(n, KV_HEADS, DIM, seed=n + 100) for n in lengths]
    k_pages, tables = paged(keys, lengths, 8, width, seed=5)
    v_pages, _ = paged(values, lengths, 8, width, seed=5)
    q, sinks = random(len(lengths), HEADS, DIM, seed=6), random(HEADS, seed=7)
    cached = decode.Cached(tables, torch.tensor(lengths).int(), max(lengths))
    found = decode.decode_attention(q, k_pages, v_pages, cached, sinks, window)
    for i, length in enumerate(lengths):
        if not length:
            assert not found[i].any()
            continue
        expected = attend(q[i], keys[i], values[i], sinks, window)
        torch.testing.assert_close(found[i].double(), expected, rtol=1e-5, atol=1e-5)


def test_a_sequence_decodes_to_the_same_bits_in_any_batch(monkeypatch):
    monkeypatch.setattr(decode, "SPLIT_KEYS", 32)
    monkeypatch.setattr(decode, "KEY_BLOCK", 16)
    lengths = (33, 60)
    keys = [random(n, KV_HEADS, DIM, seed=n) for n in lengths]
    k_pages, tables = paged(keys, lengths, 8, 10, seed=1)
    q, sinks = random(2, HEADS, DIM, seed=2), random(HEADS, seed=3)
    sizes = torch.tensor(lengths).int()
    both, alone = (
        decode.decode_attention(
            q[:n], k_pages, k_pages, decode.Cached(tables[:n], sizes[:n], longest), sinks, None
        )
        for n, longest in ((2, 80), (1, 33))
    )
    assert torch.equal(both[0], alone[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_the_plain_path_s_and_rows_land_in_their_slots(dtype):
    num_rows, page_size = 5, 4
    qkv = random(num_rows, (HEADS + 2 * KV_HEADS) * DIM, dtype=dtype)
    angles = random(num_rows, DIM // 2, seed=1)
    table = torch.complex(angles.cos() * 1.3, angles.sin() * 1.3)
    slots = torch.tensor([9, 0, -1, 5, 11])
    pages = torch.zeros(2, 3, page_size, KV_HEADS, DIM, dtype=dtype)
    q = rotate_and_store(qkv, table, slots, pages[0], pages[1])
    heads = qkv.unflatten(1, (-1, DIM))
    turned = rotate(heads[:, : HEADS + KV_HEADS], table)
    torch.testing.assert_close(q, turned[:, :HEADS])
    rows = pages.view(2, 12, KV_HEADS, DIM)
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            torch.testing.assert_close(rows[0, slot], turned[i, HEADS:])
            assert torch.equal(rows[1, slot], heads[i, HEADS + KV_HEADS :])
    untouched = [s for s in range(12) if s not in slots.tolist()]
    assert not rows[:, untouched].any()


@pytest.mark.parametrize("has_delta", [False, True])
def test_add_and_norm_round_as_two_operations_do(has_delta):
    x, delta = (random(3, 100, seed=s, dtype=torch.bfloat16) for s in (0, 1))
    weight = random(100, seed=2)
    total, found = add_rms_norm(x, delta if has_delta else None, weight, 1e-5)
    expected = x + delta if has_delta else x
    assert torch.equal(total, expected)
    values = expected.float()
    scaled = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-5) * weight
    torch.testing.assert_close(found, scaled.to(torch.bfloat16))
