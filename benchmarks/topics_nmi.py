"""How well topics agree with the source and with the language of documents.

`python -m benchmarks.topics_nmi [FILE.jsonl ...]` prints the normalised mutual information (NMI) of
k-means topics with the label of each document, for documents as terms, as rows of a backbone's
table, and as its states after each block. `states, chosen`: the block with the highest silhouette,
which `topics_from = "states"` takes. A cell is the mean of three fits, with their range.

Each FILE (JSON lines with `text`, also .gz or .zst) is a source. Without files, the sources are
modules, docstrings and descriptions of the installed Python packages. Languages are those of
translated messages (.mo) of installed packages, of Python and of the system (`XDG_DATA_DIRS`). The
messages of a catalogue are joined to documents of 600 characters. States are kept in a directory.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sysconfig
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import numpy as np
import torch
from babel.messages.mofile import read_mo
from sklearn.metrics import normalized_mutual_info_score

from loader.files.regular import read_file
from nmoe_core.cli.output import print_table
from nmoe_core.cli.project.write_docstrings import docstrings, module_files
from nmoe_core.config.cache import checkpoint_dir
from nmoe_core.curate.topics.embed import pool, read_table
from nmoe_core.curate.topics.model import fit_centroids, nearest_topics
from nmoe_core.curate.topics.states import silhouettes, standard_of, standardised
from nmoe_core.curate.topics.terms import fit_terms, term_table
from nmoe_core.engine import Transformer
from nmoe_core.quality.heads.scores import DocumentTokens, one_thread
from nmoe_core.quality.heads.shapes import probe_blocks
from nmoe_core.quality.kept_states import KeptStates
from nmoe_core.sources.jsonl import parse_object
from nmoe_core.sources.storage import open_plain
from nmoe_core.tasks.backbone import require_checkpoint
from nmoe_core.text.models import model_tokenizer
from nmoe_core.text.tokenizer import load_tokenizer

SEEDS = (42, 43, 44)
CHARS, MIN_MESSAGE = 600, 20
MIN_LANGUAGES, LANGUAGES, OF_LANGUAGE = 6, 12, 60
MAX_CHARS = 8000
TERM_TOKENS = 1024
Texts = dict[str, list[str]]


def file_texts(files: Iterable[Path]) -> Texts:
    """The texts of each JSONL file."""
    found: Texts = {}
    for path in files:
        with open_plain(path) as lines:
            rows = [parse_object(line) for line in lines if line.strip()]
        found[path.name.partition(".")[0]] = [str(row["text"]) for row in rows]
    return found


def installed_texts(most: int) -> Texts:
    """Modules, docstrings and descriptions of the installed Python packages."""
    modules = module_files(Path(sysconfig.get_path("purelib")))[: 20 * most]
    texts = [text for text in map(_text, modules) if len(text) > CHARS]
    described = [one.metadata.get_payload() for one in importlib.metadata.distributions()]  # pyright: ignore[reportAttributeAccessIssue]
    found = [row["text"] for path in modules for row in docstrings(path, path.stem)]
    descriptions = sorted({str(text) for text in described if text and len(str(text)) > CHARS})
    return {"modules": texts, "docstrings": found, "descriptions": descriptions}


def translated_texts() -> Texts:
    """Documents of translated messages by language: the `LANGUAGES` with the most documents."""
    packages = [Path(sysconfig.get_path("purelib"))]
    shared = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
    roots = packages + [Path(place) / "locale" for place in shared.split(":")]
    found: Texts = defaultdict(list)
    for path in sorted({path for root in roots for path in root.rglob("LC_MESSAGES/*.mo")}):
        language = path.parts[-3]
        if "@" not in language:  # another script or dialect
            found[language] += _documents(path)
    ranked = sorted(found, key=lambda name: (-len(found[name]), name))
    enough = {name: found[name] for name in ranked if len(found[name]) >= OF_LANGUAGE}
    if len(enough) < MIN_LANGUAGES:
        raise SystemExit(
            f"translations of {len(enough)} languages found, {MIN_LANGUAGES} needed: "
            "install packages that have some (pip install django)"
        )
    return {name: enough[name] for name in list(enough)[:LANGUAGES]}


def _documents(catalogue: Path) -> Iterator[str]:
    try:
        with open(catalogue, "rb") as file:
            messages = [one.string for one in read_mo(file) if one.id]
    except (OSError, ValueError):  # in no known encoding
        return
    text = ""
    for message in messages:
        if isinstance(message, str) and len(message) > MIN_MESSAGE:
            text += f"{message}\n"
        if len(text) > CHARS:
            yield text
            text = ""


def _text(path: Path) -> str:
    return read_file(path).decode("utf-8", "replace")


def drawn(texts: Texts, most: int) -> tuple[list[str], np.ndarray]:
    """At most so many random texts of each label, and the number of the label of each."""
    rng = np.random.default_rng(0)
    documents: list[str] = []
    labels: list[int] = []
    for number, own in enumerate(texts.values()):
        chosen = rng.permutation(len(own))[:most].tolist()
        documents += [own[i][:MAX_CHARS] for i in chosen]
        labels += [number] * len(chosen)
    return documents, np.array(labels)


class Backbone:
    """A model, its tokenizer, and the store of its states."""

    def __init__(self, name: str, max_tokens: int, directory: Path) -> None:
        path = checkpoint_dir(Path.cwd(), name)
        require_checkpoint(path)
        self.table = torch.from_numpy(read_table(path))
        found = model_tokenizer(path, len(self.table))
        assert found is not None
        self.tokenizer = load_tokenizer(found)
        self.max_tokens = max_tokens
        model = Transformer.from_checkpoint(path, dtype=torch.float32, moe_backend="int8")
        self.blocks = probe_blocks(model.config.num_hidden_layers)
        self._kept = KeptStates(model, directory, 2**62, self.blocks)

    def read(self, texts: list[str]) -> list[np.ndarray]:
        """The first tokens of each text."""
        ids = [self.tokenizer.encode_batch([text]).ids[: self.max_tokens] for text in texts]
        return [np.asarray(one, np.uint32) for one in ids]

    def states(self, tokens: list[np.ndarray]) -> np.ndarray:
        """Mean states after each block: float32 `[N, blocks, H]`."""
        names = [f"document {i}" for i in range(len(tokens))]
        with one_thread(), torch.inference_mode():
            return self._kept.pooled(DocumentTokens(names, tokens))


def agreement(rows: np.ndarray, labels: np.ndarray, num_topics: int) -> str:
    """NMI of k-means topics of unit rows with labels: the mean and range over `SEEDS`."""
    found = []
    for seed in SEEDS:
        topics = nearest_topics(rows, fit_centroids(rows, num_topics, seed))
        found.append(float(normalized_mutual_info_score(labels, topics)))
    return f"{np.mean(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def table_of(texts: Texts, most: int, backbone: Backbone) -> tuple[list[str], list[list[str]]]:
    """The header and rows of a corpus."""
    documents, labels = drawn(texts, most)
    own = backbone.read(documents)
    started = time.process_time()
    states = backbone.states(own)
    print(f"{len(own)} documents: states took {time.process_time() - started:.0f} s of processor")
    numbers = len(texts), 30
    table = pool(own, backbone.table)
    ways = {
        f"terms, {TERM_TOKENS} tokens": by_terms(documents, TERM_TOKENS),
        f"terms, {backbone.max_tokens} tokens": by_terms(documents, backbone.max_tokens),
        "rows of the table": table,
        "rows of the table, standardised": standardised(table, standard_of(table)),
    }
    of_block = {}
    for place, block in enumerate(backbone.blocks):
        own_states = states[:, place]
        of_block[block] = standardised(own_states, standard_of(own_states))
    rows = [[name, *(agreement(way, labels, k) for k in numbers)] for name, way in ways.items()]
    for block, way in of_block.items():
        rows.append([f"states, block {block}", *(agreement(way, labels, k) for k in numbers)])
    chosen = ["states, chosen"]
    for k in numbers:
        scores = silhouettes(states, k, SEEDS[0])
        block = backbone.blocks[scores.index(max(scores))]
        chosen.append(f"{agreement(of_block[block], labels, k)}, block {block}")
    return ["documents as", *(f"{k} topics" for k in numbers)], [*rows, chosen]


def by_terms(documents: list[str], max_tokens: int) -> np.ndarray:
    """Unit rows of terms of the first tokens."""
    tokenizer = load_tokenizer("o200k_harmony")
    ids = [tokenizer.encode_batch([text]).ids[:max_tokens] for text in documents]
    texts = [np.asarray(one, np.int64) for one in ids]
    table = term_table(fit_terms(texts, SEEDS[0]), tokenizer.vocab_size)
    return pool(texts, torch.from_numpy(table))


def main() -> None:
    """Print the tables of both corpora."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--checkpoint", default="smollm2")
    parser.add_argument("--documents", type=int, default=100, help="of each source")
    parser.add_argument("--max-tokens", type=int, default=128, help="that the backbone reads")
    parser.add_argument("--directory", type=Path, default=Path("build/topics_nmi"))
    arguments = parser.parse_args()
    backbone = Backbone(arguments.checkpoint, arguments.max_tokens, arguments.directory)
    most = arguments.documents
    sources = file_texts(arguments.files) if arguments.files else installed_texts(most)
    for what, texts, count in (
        ("source", sources, most),
        ("language", translated_texts(), OF_LANGUAGE),
    ):
        header, rows = table_of(texts, count, backbone)
        print(f"NMI with the {what}: {', '.join(texts)}")
        print_table(header, rows)


if __name__ == "__main__":
    main()
