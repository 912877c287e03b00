"""Other pipelines from JSON lines to tokens, each in an environment of its own from the registry.

Each runs with two processes and the tokenizer it ships: Hugging Face `tokenizers` with the same
vocabulary (`tokenizer.json` made by transformers' converter from tiktoken's file; the official one
may be faster), or tiktoken where the tool takes a function. None of them normalises text or hashes
what it writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import orjson

from benchmarks.environments import TORCH
from benchmarks.prep.measure import Measured, run
from nmoe_core.text.vocabulary import ensure_vocabulary, load_tiktoken

_VOCABULARY_FILE = "fb374d419588a4632f3f557e76b4b70aebbca790"


class Peer(NamedTuple):
    """What to install, what to run in that environment, and what to say about it."""

    requirements: tuple[str, ...]
    script: str
    remark: str


_DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
if __name__ == "__main__":
    documents, out, tokenizer = sys.argv[1:]
    steps = [
        JsonlReader(documents, glob_pattern="*.jsonl"),
        DocumentTokenizer(out, tokenizer_name_or_path=tokenizer, eos_token=None,
                          shuffle_documents=False),
    ]
    LocalPipelineExecutor(steps, tasks=2, workers=2, logging_dir=out + "/logs").run()
"""
_DOLMA = """
import sys
from dolma.cli.__main__ import main
if __name__ == "__main__":
    documents, out, tokenizer = sys.argv[1:]
    main(["tokens", "--documents", documents + "/*.jsonl", "--destination", out, "--processes", "2",
          "--tokenizer.name_or_path", tokenizer, "--tokenizer.eos_token_id", "199999",
          "--tokenizer.pad_token_id", "199999", "--dtype", "uint32"])
"""
_STREAMING = """
import glob, json, sys, types
from concurrent.futures import ProcessPoolExecutor
import numpy as np
import tiktoken
# The package imports torchvision for datasets of images, which lacks a build for every torch.
sys.modules.setdefault("streaming.vision", types.ModuleType("streaming.vision"))
from streaming import MDSWriter
def convert(job):
    path, out = job
    encoding = tiktoken.get_encoding("o200k_harmony")
    with MDSWriter(out=out, columns={"tokens": "ndarray:uint32"}, hashes=["sha256"]) as writer:
        for line in open(path, encoding="utf-8"):
            ids = encoding.encode_ordinary(json.loads(line)["text"])
            writer.write({"tokens": np.array(ids, np.uint32)})
if __name__ == "__main__":
    documents, out, _ = sys.argv[1:]
    paths = sorted(glob.glob(documents + "/*.jsonl"))
    jobs = [(path, f"{out}/{i}") for i, path in enumerate(paths)]
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(convert, jobs))
"""
_MEGATRON = """
import glob, json, multiprocessing, sys
import numpy as np, torch
from tokenizers import Tokenizer
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
def start(path):
    global tokenizer
    tokenizer = Tokenizer.from_file(path)
def encode(line):
    return tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids + [199999]
if __name__ == "__main__":
    documents, out, path = sys.argv[1:]
    lines = (line for name in sorted(glob.glob(documents + "/*.jsonl")) for line in open(name))
    builder = IndexedDatasetBuilder(out + "/tokens.bin", dtype=np.int32)
    with multiprocessing.Pool(2, start, (path,)) as pool:
        for ids in pool.imap(encode, lines, 32):
            builder.add_document(torch.IntTensor(ids), [len(ids)])
    builder.finalize(out + "/tokens.idx")
"""
PEERS = {
    "datatrove": Peer(
        ("datatrove[io]", "tokenizers", "orjson", "regex"),
        _DATATROVE,
        "HF tokenizers; JsonlReader and DocumentTokenizer without its shuffle",
    ),
    # Its pinned s3fs goes with old releases of boto3 only, which pip would try one by one.
    "dolma": Peer(("dolma", "boto3<1.28"), _DOLMA, "HF tokenizers; `dolma tokens`"),
    "streaming": Peer(
        ("mosaicml-streaming", TORCH, "tiktoken"),
        _STREAMING,
        "tiktoken; MDSWriter with sha256, one writer a process",
    ),
    "megatron": Peer(
        ("megatron-core", TORCH, "tokenizers"),
        _MEGATRON,
        "HF tokenizers; the loop of its preprocess_data, which the package does not ship",
    ),
}


def prepare(path: Path, directory: Path) -> tuple[Path, Path]:
    """The documents as two files with the fields that peers ask for, and a `tokenizer.json`."""
    documents = directory / "documents"
    documents.mkdir(parents=True, exist_ok=True)
    lines = path.read_bytes().splitlines()
    for k in range(2):
        with open(documents / f"{k}.jsonl", "wb") as file:
            for i, line in enumerate(lines[k::2]):
                row = {"id": f"{k}-{i}", "source": "bench", "added": "", **orjson.loads(line)}
                file.write(orjson.dumps(row) + b"\n")
    return documents, _tokenizer_json(directory / "tokenizer.json")


def measure(name: str, python: Path, documents: Path, tokenizer: Path) -> Measured:
    """Run a peer on the documents."""
    out = documents.parent / "out" / name
    script = documents.parent / f"{name}_prep.py"
    script.write_text(PEERS[name].script)
    out.mkdir(parents=True, exist_ok=True)
    return run([python, script, documents, out, tokenizer])


def _tokenizer_json(path: Path) -> Path:
    if not path.exists():
        from transformers.convert_slow_tokenizer import TikTokenConverter

        pattern = load_tiktoken("o200k_base")._pat_str
        vocabulary = str(ensure_vocabulary() / _VOCABULARY_FILE)
        converted = TikTokenConverter(vocab_file=vocabulary, pattern=pattern).converted()
        tokenizer = orjson.loads(converted.to_str())
        # As older releases of `tokenizers` read them; newer ones read both forms.
        merges = tokenizer["model"]["merges"]
        tokenizer["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in merges]
        path.write_bytes(orjson.dumps(tokenizer))
    return path
