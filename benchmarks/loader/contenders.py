"""Loaders under test: each is `open(directory, seq_len, batch_size) -> endless batches`.

A batch is int64 `[batch_size, seq_len + 1]`, or inputs and targets that hold as much, drawn 0.7/0.3
from two sources where the loader can mix. Every contender gets its fastest documented form without
worker processes; opened files are kept open for all of them.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loader.data import (
    EOS,
    NUM_TOKENS,
    SOURCES,
    VOCAB_SIZE,
    WEIGHTS,
    all_tokens,
    token_files,
)
from benchmarks.loader.own import Batches, floor, ours, strided


def nanogpt(directory: Path, seq_len: int, batch_size: int, *, keeps_maps: bool = False) -> Batches:
    """nanoGPT's get_batch: maps made anew, random offsets, rows widened and stacked once."""
    import torch

    paths = [token_files(directory, source)[0] for source in SOURCES]
    maps = [np.memmap(path, np.uint32, "r", 128) for path in paths]
    last = min(map(len, maps)) - seq_len - 1
    rng = np.random.default_rng(0)
    for step in count():
        if not keeps_maps:
            maps = [np.memmap(path, np.uint32, "r", 128) for path in paths]
        rows = [
            torch.from_numpy(tokens[at : at + seq_len + 1].astype(np.int64))
            for tokens, taken in zip(maps, _taken(step, batch_size))
            for at in rng.integers(0, last, taken).tolist()
        ]
        yield torch.stack(rows)


def gather(directory: Path, seq_len: int, batch_size: int) -> Batches:
    """The same with maps that stay open."""
    return nanogpt(directory, seq_len, batch_size, keeps_maps=True)


def round_robin(directory: Path, seq_len: int, batch_size: int) -> Batches:
    """The usual loader over uint32 shards: smooth weighted round-robin in Python, a slice of a
    memory map for each row, stacked to inputs and targets."""
    import torch

    sources = [
        [np.load(path, mmap_mode="r") for path in token_files(directory, s)] for s in SOURCES
    ]
    weights = [round(w * 1_000_000) for w in WEIGHTS]
    charged, cursors, width = [0, 0], [[0, 0], [0, 0]], seq_len + 1
    while True:
        rows = []
        for _ in range(batch_size):
            charged = [c + w for c, w in zip(charged, weights)]
            pick = charged.index(max(charged))
            charged[pick] -= sum(weights)
            file, at = cursors[pick]
            tokens = sources[pick][file]
            if at + width > len(tokens):
                file, at = (file + 1) % len(sources[pick]), 0
                tokens = sources[pick][file]
            rows.append(torch.from_numpy(tokens[at : at + width].astype(np.int64)))
            cursors[pick] = [file, at + width]
        whole = torch.stack(rows)
        yield whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


def datatrove(directory: Path, seq_len: int, batch_size: int) -> Batches:
    """DatatroveFolderDataset in order; it does not mix, so two are read 0.7/0.3."""
    import torch
    from datatrove.utils.dataset import DatatroveFolderDataset

    sets = []
    for source in SOURCES:
        folder = directory / "peers" / "datatrove" / source
        if not folder.exists():
            folder.mkdir(parents=True)
            all_tokens(directory, source).tofile(folder / "tokens.ds")
        sets.append(
            DatatroveFolderDataset(
                str(folder), seq_len, filename_pattern="*.ds", token_size=4, shuffle=False
            )
        )
    at = [0, 0]
    for step in count():
        taken = _taken(step, batch_size)
        rows = []
        for i, number in enumerate(taken):
            for _ in range(number):
                rows.append(sets[i][at[i] % len(sets[i])]["input_ids"])
                at[i] += 1
        yield torch.stack(rows)


def litdata(directory: Path, seq_len: int, batch_size: int) -> Batches:
    """CombinedStreamingDataset over TokensLoader, batched by StreamingDataLoader."""
    from litdata import (
        CombinedStreamingDataset,
        StreamingDataLoader,
        StreamingDataset,
        TokensLoader,
    )
    from litdata.streaming.writer import BinaryWriter

    sets = []
    for source in SOURCES:
        folder = directory / "peers" / f"litdata-{seq_len}" / source
        if not folder.exists():
            import torch

            folder.mkdir(parents=True)
            writer = BinaryWriter(
                str(folder), chunk_size=(seq_len + 1) * 2048, item_loader=TokensLoader()
            )
            tokens = torch.from_numpy(all_tokens(directory, source).astype(np.int64))
            for i, part in enumerate(tokens.split(seq_len + 1)):
                writer[i] = part
            writer.done()
            writer.merge()
        loader = TokensLoader(block_size=seq_len + 1)
        sets.append(StreamingDataset(str(folder), item_loader=loader, shuffle=False))
    mixed = CombinedStreamingDataset(sets, seed=0, weights=WEIGHTS, iterate_over_all=False)
    while True:
        yield from StreamingDataLoader(mixed, batch_size=batch_size, num_workers=0, drop_last=True)


def streaming(directory: Path, seq_len: int, batch_size: int) -> Batches:
    """MosaicML StreamingDataset with two streams by proportion."""
    # Its package imports torchvision for datasets of images, which lacks a build for every torch.
    sys.modules.setdefault("streaming.vision", types.ModuleType("streaming.vision"))
    from streaming import MDSWriter, Stream, StreamingDataset
    from torch.utils.data import DataLoader

    streams = []
    for source, weight in zip(SOURCES, WEIGHTS):
        folder = directory / "peers" / f"mds-{seq_len}" / source
        if not folder.exists():
            tokens, width = all_tokens(directory, source), seq_len + 1
            columns = {"tokens": f"ndarray:uint32:{width}"}
            with MDSWriter(out=str(folder), columns=columns) as writer:
                for i in range(len(tokens) // width):
                    writer.write({"tokens": tokens[i * width : (i + 1) * width]})
        streams.append(Stream(local=str(folder), proportion=weight))
    data = StreamingDataset(streams=streams, shuffle=False, batch_size=batch_size)

    def collate(rows: list[dict[str, np.ndarray]]) -> Any:
        import torch

        return torch.from_numpy(np.stack([row["tokens"] for row in rows]).astype(np.int64))

    while True:
        yield from DataLoader(data, batch_size, num_workers=0, collate_fn=collate, drop_last=True)


def grain(directory: Path, seq_len: int, batch_size: int) -> Batches:
    """MapDataset.mix of two memory-mapped sources, repeated and batched."""
    from grain import python as pygrain

    class Windows:
        def __init__(self, path: Path) -> None:
            self._tokens = np.asarray(np.load(path, mmap_mode="r"))

        def __len__(self) -> int:
            return (len(self._tokens) - 1) // seq_len

        def __getitem__(self, i: int) -> np.ndarray:
            return self._tokens[i * seq_len : (i + 1) * seq_len + 1].astype(np.int64)

    sets = [
        pygrain.MapDataset.source(Windows(token_files(directory, source)[0])).repeat()
        for source in SOURCES
    ]
    mixed = pygrain.MapDataset.mix(sets, weights=WEIGHTS).batch(batch_size, drop_remainder=True)
    for step in count():
        yield mixed[step]


def megatron(directory: Path, seq_len: int, batch_size: int) -> Batches:
    """megatron-core's BlendedDataset of two GPTDatasets, read in order and stacked."""
    import torch
    import torch.distributed

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefixes = []
    for source in SOURCES:
        prefix = directory / "peers" / "megatron" / source
        prefixes.append(str(prefix))
        if not prefix.with_suffix(".idx").exists():
            prefix.parent.mkdir(parents=True, exist_ok=True)
            builder = IndexedDatasetBuilder(f"{prefix}.bin", np.int32)
            for document in torch.from_numpy(all_tokens(directory, source).view("i4")).split(1000):
                builder.add_document(document, [len(document)])
            builder.finalize(f"{prefix}.idx")

    class Tokenizer:
        eod, pad, vocab_size, unique_identifiers = EOS, EOS, VOCAB_SIZE, {"class": "Tokenizer"}

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=seq_len,
        blend=(prefixes, list(WEIGHTS)),
        split="1,0,0",
        path_to_cache=str(directory / "peers" / "megatron" / "cache"),
        tokenizer=Tokenizer(),  # pyright: ignore[reportArgumentType]
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    steps = NUM_TOKENS // seq_len // batch_size
    sizes = [steps * batch_size, 0, 0]
    data, *_ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    while True:
        for step in range(steps):
            rows = [data[i] for i in range(step * batch_size, (step + 1) * batch_size)]
            inputs = torch.stack([row["tokens"] for row in rows])
            yield inputs, torch.stack([row["labels"] for row in rows])


def olmo(directory: Path, seq_len: int, batch_size: int) -> Batches:
    """OLMo-core's NumpyFSLDataset and its data loader; one concatenated source, unmixed."""
    from olmo_core.data import NumpyDataLoaderBase, NumpyFSLDataset
    from olmo_core.data.collator import DataCollator

    folder = directory / "peers" / "olmo"
    paths = []
    for source in SOURCES:
        path = folder / f"{source}.npy"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            all_tokens(directory, source).tofile(path)
        paths.append(path)
    data = NumpyFSLDataset(
        *paths,
        sequence_length=seq_len + 1,
        pad_token_id=EOS,
        eos_token_id=EOS,
        vocab_size=VOCAB_SIZE,
        dtype=np.uint32,
    )
    data.prepare()
    loader = NumpyDataLoaderBase.wrap_numpy_dataset(
        data,
        global_batch_size=batch_size * (seq_len + 1),
        collator=DataCollator(pad_token_id=EOS),
        work_dir=folder / "work",
        num_workers=0,
    )
    for epoch in count(1):
        loader.reshuffle(epoch)
        for batch in loader:
            yield batch["input_ids"]


def _taken(step: int, batch_size: int) -> tuple[int, int]:
    """Rows of both sources in a step, 0.7/0.3 over the run."""
    first = round((step + 1) * batch_size * WEIGHTS[0]) - round(step * batch_size * WEIGHTS[0])
    return first, batch_size - first


CONTENDERS: dict[str, Callable[[Path, int, int], Batches]] = {
    function.__name__: function
    for function in (
        ours,
        strided,
        floor,
        nanogpt,
        gather,
        round_robin,
        datatrove,
        litdata,
        streaming,
        grain,
        megatron,
        olmo,
    )
}
