"""Every format: how a valid file is made, how it is read, and which results are right."""

import atexit
import gzip
import io
import itertools
import json
import shutil
import tempfile
import tomllib
from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import safetensors.numpy
import safetensors.torch
import tokenizers
import torch
import zstandard

from loader import resolve_plan
from loader.errors import FormatError
from loader.files.format import load_manifest, read_json_object
from loader.loader import DeterministicLoader
from loader.plan.file import load_plan
from nmoe_core.base.docid import parse_doc_id
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.config.tree import Tree
from nmoe_core.curate.takedown.record import add_rows, read_grams, read_rows
from nmoe_core.curate.topics import MODEL_FORMAT
from nmoe_core.curate.topics.model import load_topic_model, save_tensors
from nmoe_core.engine import Transformer, make_tiny_checkpoint
from nmoe_core.engine.weights.checkpoint import open_checkpoint
from nmoe_core.labels.label_files import read_labels
from nmoe_core.labels.slices import read_slice
from nmoe_core.prep.journal import Journal
from nmoe_core.quality.calibration.graded import read_graded
from nmoe_core.quality.calibration.summary_file import read_calibration
from nmoe_core.quality.heads.head_files import read_head
from nmoe_core.quality.heads.student_file import load_student
from nmoe_core.shards.documents import document_ids
from nmoe_core.shards.verify import verify_manifest
from nmoe_core.text.tokenizer import load_tokenizer
from tests.core.small_gradings import VOCAB, Grading, corpus_of, random_documents, write_source
from tests.core.sources.read import opened, records
from tests.fuzz.driver import Family
from tests.fuzz.replies import http_replies
from tests.fuzz.selections import selections
from tests.fuzz.stores import store_replies
from tests.own_tokenizers import byte_level, pieces
from tests.project import contents, json_lines, jsonl_source, write_project

Make = Callable[[Path], Family]
TEXTS = [f"Text {i} — naïve “quotes”, tabs\t and 東京, said twice: {i * 7919}." for i in range(40)]


# Shards, and what is made of them.


def _shards(ending: str, directory: Path) -> Family:
    write_source(directory, "web", random_documents(3, 24), num_shards=2)

    def read(root: Path) -> object:
        manifest = load_manifest(root / "web" / "train" / "manifest.json")
        for problem in verify_manifest(manifest, checksums=True, deep=True):
            raise problem.error
        ids = [str(row) for row in document_ids(root, manifest)]
        return ids, [np.load(manifest.shard_path(s)).tolist() for s in manifest.shards]

    return Family(contents(directory), (ending,), read)


def _doc_ids(directory: Path) -> Family:
    (directory / "id").write_text("web//web/train/shard_0003/web-v1-shard-000012.npy#s=17:e=4093")

    def text(root: Path) -> str:
        return (root / "id").read_bytes().decode("utf-8", "replace")

    def is_right(root: Path, found: object) -> bool:
        # One id has one spelling.
        source, rel, start, end = found  # pyright: ignore[reportGeneralTypeIssues]
        return text(root) == f"{source}//{rel}#s={start}:e={end}"

    return Family(contents(directory), ("id",), lambda root: parse_doc_id(text(root)), is_right)


def _planned(directory: Path) -> Path:
    write_source(directory, "web", random_documents(4, 40), num_shards=2)
    settings = {"data_path": directory / "web", "batch_size": 2, "seq_len": 16}
    plan = resolve_plan(settings)
    path = directory / "web" / "plan.json"  # its paths start there
    path.write_text(plan.to_json())
    return path


def _plans(directory: Path) -> Family:
    name = _planned(directory).relative_to(directory)
    return Family(
        contents(directory), ("plan.json",), lambda root: load_plan(root / name).plan_hash
    )


def _states(directory: Path) -> Family:
    with DeterministicLoader(load_plan(_planned(directory)), backend="numpy") as loader:
        rows = [np.array(batch[0]).tolist() for batch in loader]
    with DeterministicLoader(load_plan(directory / "web" / "plan.json"), backend="numpy") as loader:
        next(loader)
        state = loader.state_dict()
    (directory / "state.json").write_text(json.dumps(state))

    def read(root: Path) -> object:
        state = read_json_object(root / "state.json")
        with DeterministicLoader(load_plan(root / "web" / "plan.json"), backend="numpy") as loader:
            loader.load_state_dict(state)
            return np.array(next(loader, [[]])[0]).tolist()

    def is_right(root: Path, found: object) -> bool:
        state = json.loads((root / "state.json").read_bytes())
        if "version" not in state:  # counts alone, of which each is a position
            return "datasets" in state
        at = state["global_sequence_index"]
        follows = [*itertools.chain(*rows)][at : at + 2]
        return state["version"] < 3 and found == follows

    return Family(contents(directory), ("state.json",), read, is_right)


def _attributes(directory: Path) -> Family:
    from nmoe_core.shards import attribute_file as files

    documents = files.Documents(
        [f"web//web/a.npy#s={i}:e={i + 1}" for i in range(30)], ["0" * 64] * 30
    )
    table = pa.table({"n": pa.array(range(30), pa.int32()), "s": [f"text {i}" for i in range(30)]})
    path = directory / "x.parquet"
    files.write_attribute(path, "x", {"code": "x/1"}, documents, table.schema, table.to_batches())

    def read(root: Path) -> object:
        footer, found = (
            files.read_footer(root / "x.parquet"),
            files.read_attribute(root / "x.parquet"),
        )
        if footer.digest != files.rows_digest(found):  # as a task does for attributes it reads
            raise FormatError("rows are not those of the digest")
        return found.to_pylist()  # other fingerprints in the footer have it made again

    return Family(contents(directory), ("x.parquet",), read)


def _takedown(directory: Path) -> Family:
    tree, documents = Tree.below(directory), random_documents(5, 4)
    row = {"item": "id:a", "is_copy": False, "source": "web", "split": "train", "at": "now"}
    rows = [
        row | {"text_sha256": f"{i:064x}", "ingest_id": f"d{i}", "doc_id": "", "tokenizer": "t"}
        for i in range(4)
    ]
    tokens = {row["text_sha256"]: np.array(d, "<u4") for row, d in zip(rows, documents)}
    add_rows(tree, rows, tokens, lambda ids: " ".join(map(str, ids.tolist())))

    def read(root: Path) -> object:
        found = read_rows(Tree.below(root))
        return [*map(str, found)], read_grams(Tree.below(root), found).tolist()

    return Family(contents(directory), ("documents.jsonl", "grams.npy"), read)


# Labels, heads, calibrations, grades.


@cache
def _graded() -> Grading:
    """One project for all families of graders; it is removed when the process ends."""
    directory = Path(tempfile.mkdtemp(prefix="fuzz"))
    atexit.register(shutil.rmtree, directory)
    torch.set_num_threads(1)
    write_source(directory / "data", "web", random_documents(1, 120))
    write_source(directory / "data", "books", random_documents(2, 40))
    sizes: dict[str, Any] = {"num_experts": 2, "hidden_size": 32, "head_dim": 8}
    make_tiny_checkpoint(directory / "backbone", vocab_size=VOCAB, **sizes)
    model = Transformer.from_checkpoint(directory / "backbone")
    made = Grading(directory, directory / "data", model)
    made.calibrate()
    return made


def _labels(_: Path) -> Family:
    made = _graded()
    names = ["labels_val.jsonl"]

    def read(root: Path) -> object:
        labels = read_labels(root / names[0])
        return labels.doc_ids, labels.scores.tolist()

    def is_right(root: Path, found: object) -> bool:
        lines = (root / names[0]).read_bytes().split(b"\n")[:-1]  # a torn last one is none
        rows = {r["doc_id"]: r for r in map(json.loads, filter(bytes.strip, lines))}
        good = [row for row in rows.values() if row["ok"]]
        return found == ([r["doc_id"] for r in good], [[*r["scores"].values()] for r in good])

    payload = b"".join(made.labels.read_bytes().splitlines(keepends=True)[:12])
    return Family({names[0]: payload}, (names[0],), read, is_right)


def _slices(_: Path) -> Family:
    slices = _graded().base / "slices"
    read = lambda root: read_slice(root / "docids_val.jsonl")  # noqa: E731
    return Family(contents(slices), ("docids_val.jsonl", "slices_manifest.json"), read)


def _heads(_: Path) -> Family:
    heads = _graded().heads

    def read(root: Path) -> object:
        header, tensors = read_head(root / "hydra_judge.safetensors")
        return header, {name: value.tolist() for name, value in tensors.items()}

    return Family(contents(heads), ("judge.safetensors",), read)


def _students(directory: Path) -> Family:
    from tests.core.small_gradings import write_student

    made = _graded()
    path = write_student({"train": made.labels}, corpus_of(made.data), directory / "students")

    def read(root: Path) -> object:
        found = load_student(root / path.name)
        return found.header, sha256(found.student.weights.tobytes()).hexdigest()

    return Family(contents(path.parent), (path.name,), read)


def _calibrations(_: Path) -> Family:
    made = _graded()
    read = lambda root: read_calibration(root / "calibration_summary.json")  # noqa: E731
    return Family(contents(made.calibration), ("summary.json",), read)


def _scores(_: Path) -> Family:
    graded = _graded().grade().directory
    read = lambda root: [*read_graded(root).rows()]  # noqa: E731
    return Family(contents(graded), ("quality_scores.jsonl", "summary.json"), read)


def _checkpoints(directory: Path) -> Family:
    sizes: dict[str, Any] = {"num_layers": 2, "num_experts": 2, "hidden_size": 32}
    sizes["intermediate_size"] = 32
    make_tiny_checkpoint(directory, vocab_size=64, **sizes)

    def read(root: Path) -> object:
        with open_checkpoint(root) as found:
            return {n: found.files.read(n).float().tolist() for n in sorted(found.files.specs)}

    def is_right(root: Path, found: object) -> bool:
        paths = sorted(root.glob("*.safetensors"))
        other = {k: v for p in paths for k, v in safetensors.torch.load(p.read_bytes()).items()}
        return repr(found) == repr({n: other[n].float().tolist() for n in sorted(other)})

    return Family(contents(directory), ("config.json", ".safetensors"), read, is_right)


def _topics(directory: Path) -> Family:
    centroids = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    header = {"format": MODEL_FORMAT, "num_topics": 4, "fingerprints": {"code": "a"}}
    save_tensors(directory / "m.safetensors", {"centroids": centroids}, header)

    def read(root: Path) -> object:
        model = load_topic_model(root / "m.safetensors")
        return model.centroids.tolist(), model.header

    def is_right(root: Path, found: object) -> bool:
        payload = (root / "m.safetensors").read_bytes()
        same = safetensors.numpy.load(payload)["centroids"].tolist()
        return repr(found).startswith(repr((same, ""))[:-4]) and "nan" not in repr(same)

    return Family(contents(directory), ("m.safetensors",), read, is_right)


def _journals(directory: Path) -> Family:
    entry = {"fingerprints": {"source": "a"}, "position": [0, 1, 2, 3], "files": {"a": 5}}
    Journal(directory).commit(lambda: dict(entry), list)
    is_right = lambda _, found: found is None  # noqa: E731  (work is done again)
    return Family(contents(directory), (".json",), lambda r: Journal(r).read(), is_right)


# What people write.


def _configurations(directory: Path) -> Family:
    settings = {
        "prep": {"num_shards": 3, "max_tokens": "1M", "workers": 2},
        "curation": {"num_topics": 5, "where": "n_words > 5"},
        "calibration": {"max_false_drop": 0.05},
        "oracle": {"http": {"base_url": "http://localhost:8000/v1", "model": "m"}},
    }
    project = write_project(directory, [jsonl_source("web", [{"text": "a"}])], settings)

    def read(root: Path) -> object:
        run = type(project)(root).run
        return run.config.model_dump(mode="json"), str(run.loader.seq_len)

    def is_right(root: Path, found: object) -> bool:
        table = tomllib.loads((root / "run.toml").read_text())
        config: Any = found[0]  # pyright: ignore[reportIndexIssue]
        return all(_holds(config[k], v) for k, v in table.items() if isinstance(v, dict))

    return Family(contents(directory), (".toml",), read, is_right)


def _holds(config: Any, table: Any) -> bool:
    if not isinstance(table, dict):
        return config == table or str(table)[-1:] in "kKMBT"
    return all(key in config and _holds(config[key], value) for key, value in table.items())


def _sources(kind: str, suffix: str, directory: Path) -> Family:
    rows = [{"id": f"d{i}", "text": text} for i, text in enumerate(TEXTS)]
    payload, table, sink = json_lines(rows).encode(), pa.Table.from_pylist(rows), io.BytesIO()
    match suffix:
        case ".gz":
            payload = gzip.compress(payload, mtime=0)
        case ".zst":
            payload = zstandard.ZstdCompressor(write_checksum=True).compress(payload)
        case ".parquet":
            pq.write_table(table, sink)
        case ".arrow":
            feather.write_feather(table, sink, compression="uncompressed")
    name = f"in{suffix}" if suffix in (".parquet", ".arrow", ".jsonl") else f"in.jsonl{suffix}"
    (directory / name).write_bytes(sink.getvalue() or payload)

    def read(root: Path) -> object:
        split = opened(root, kind=kind, paths=[name], on_error="skip")
        return [getattr(record, "text", None) for record in records(split.source)]

    return Family(contents(directory), (name,), read, partial(_is_in_file, name))


def _is_in_file(name: str, root: Path, found: object) -> bool:
    """Whether the texts are those that the format's own library reads; None for a bad record."""
    payload = (root / name).read_bytes()
    if name.endswith((".parquet", ".arrow")):
        read = pq.read_table if name.endswith(".parquet") else feather.read_table
        column = read(io.BytesIO(payload), columns=["text"]).column("text")
        return found == [_decoded(text) for text in column.cast(pa.binary()).to_pylist()]
    if name.endswith(".gz"):
        payload = gzip.decompress(payload)
    elif name.endswith(".zst"):
        payload = (
            zstandard.ZstdDecompressor().stream_reader(payload, read_across_frames=True).read()
        )
    lines = payload.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return found == [_text_in(line) for line in lines if line.strip(b" \t\r\n\x0b\x0c")]


def _decoded(text: bytes | None) -> str | None:
    try:
        return (text or b"").decode()
    except UnicodeDecodeError:
        return None


def _text_in(line: bytes) -> str | None:
    """The text of a JSON line whose id is a text or a whole number of 64 bits; None without one."""
    try:
        row = json.loads(line.decode())
        text, name = row["text"], row.get("id")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    is_good = isinstance(text, str | None) and isinstance(name, str | int | None)
    is_long = isinstance(name, int) and not -(2**63) <= name < 2**64
    return (text or "") if is_good and not is_long and not isinstance(name, bool) else None


def _tokenizers(write: Callable[..., None], directory: Path) -> Family:
    write(directory, TEXTS * 5)
    name = "tokenizer.json" if write is byte_level else "tokenizer.model"

    def read(root: Path) -> object:
        found = load_tokenizer(TokenizerSettings(str(root / name), "reference"))
        return found.encode_batch([TEXTS[3]]).ids.tolist()

    def is_right(root: Path, found: object) -> bool:
        if write is byte_level:
            other = tokenizers.Tokenizer.from_file(str(root / name))
            return found == other.encode(TEXTS[3], add_special_tokens=False).ids
        import sentencepiece

        other = sentencepiece.SentencePieceProcessor(model_file=str(root / name))
        return found == other.encode(TEXTS[3])

    return Family(contents(directory), (name, "tokenizer_config.json"), read, is_right)


FAMILIES: dict[str, Make] = {
    "shard": partial(_shards, ".npy"),
    "index": partial(_shards, ".idx"),
    "ids": partial(_shards, ".ids.jsonl"),
    "manifest": partial(_shards, "manifest.json"),
    "document id": _doc_ids,
    "plan": _plans,
    "state": _states,
    "attribute": _attributes,
    "takedown": _takedown,
    "labels": _labels,
    "slices": _slices,
    "head": _heads,
    "student": _students,
    "calibration": _calibrations,
    "scores": _scores,
    "checkpoint": _checkpoints,
    "topic model": _topics,
    "journal": _journals,
    "configuration": _configurations,
    "jsonl": partial(_sources, "jsonl", ".jsonl"),
    "jsonl.gz": partial(_sources, "jsonl", ".gz"),
    "jsonl.zst": partial(_sources, "jsonl", ".zst"),
    "parquet": partial(_sources, "parquet", ".parquet"),
    "arrow": partial(_sources, "arrow", ".arrow"),
    "tokenizer.json": partial(_tokenizers, byte_level),
    "tokenizer.model": partial(_tokenizers, pieces),
    "http reply": http_replies,
    "store reply": store_replies,
    "selection": selections,
}
