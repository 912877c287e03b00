"""A tokenizer of one's own goes through prep, loader and export, in uint16 where its ids fit."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader import load_manifest, open_loader, open_shard
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.engine import make_tiny_checkpoint
from nmoe_core.prep.settings import PrepSettings, shard_format
from nmoe_core.quality.heads.scores import Corpus
from nmoe_core.shards.documents import shard_files
from nmoe_core.shards.export.run import export
from nmoe_core.shards.verify import verify_manifest
from nmoe_core.tasks.backbone import ids_for_model, require_checkpoints
from nmoe_core.text.models import model_ids
from nmoe_core.text.tokenizer import load_tokenizer
from tests.project import jsonl_source, said, write_project
from tests.refusals import refused, refused_line

tokenizers = pytest.importorskip("tokenizers")
TEXTS = [f"document {i} of the sources, naïve 東京 and </s> " * (1 + i % 5) for i in range(60)]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A byte-level `tokenizer.json` that names its EOS and BOS."""
    level = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = level(False), tokenizers.decoders.ByteLevel()
    alphabet, specials = level.alphabet(), ["<s>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    path = tmp_path_factory.mktemp("own") / "tokenizer.json"
    made.save(str(path))
    config = json.dumps({"eos_token": "</s>", "bos_token": "<s>"})
    (path.parent / "tokenizer_config.json").write_text(config)
    return str(path)


@pytest.fixture(autouse=True)
def _few_code_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmoe_core.text.equivalence.SWEPT", (range(0x1F600, 0x1F640),))


def prep_command(tmp_path: Path, name: str, *flags: str) -> list[str]:
    source = tmp_path / "in.jsonl"
    lines = [json.dumps({"id": f"d{i}", "text": text}) for i, text in enumerate(TEXTS)]
    source.write_text("\n".join(lines) + "\n")
    output = tmp_path / "data" / name / "train"
    command = ["prep", "--source", "jsonl", "--paths", str(source), "--num-shards", "2"]
    command += ["--set=prep.min_doc_tokens=1"]
    return [*command, "--output", str(output), "--name", name, *flags]


def prepared(tmp_path: Path, name: str, *flags: str) -> Any:
    assert main(prep_command(tmp_path, name, *flags)) == 0
    return load_manifest(tmp_path / "data" / name / "train" / "manifest.json")


def documents(tmp_path: Path, manifest: Any) -> list[tuple[tuple[str, str], list[int]]]:
    files = shard_files(tmp_path / "data", manifest)
    return [(ids, tokens.tolist()) for file in files for _, tokens, ids in file.documents()]


def test_two_tokenizers_give_the_same_documents_in_the_same_order(own: str, tmp_path: Path) -> None:
    manifests = [prepared(tmp_path, "a", "--tokenizer", own), prepared(tmp_path, "b")]
    assert [manifest.tokenizer for manifest in manifests] == [
        load_tokenizer(own).name,
        "o200k_harmony",
    ]
    found = [documents(tmp_path, manifest) for manifest in manifests]
    assert [ids for ids, _ in found[0]] == [ids for ids, _ in found[1]]
    assert len(found[0]) == len(TEXTS)
    texts = [load_tokenizer(name) for name in (own, "o200k_harmony")]
    decoded = [
        [tokenizer.decode(tokens[:-1]) for _, tokens in rows]
        for tokenizer, rows in zip(texts, found)
    ]
    assert decoded[0] == decoded[1]


def test_uint16_is_taken_where_the_largest_id_is_65535_and_no_further(tmp_path: Path) -> None:
    for num_ids, dtype in ((2**16, "uint16"), (2**16 + 1, "uint32")):
        ids = {f"w{i}": i for i in range(num_ids - 1)} | {"</s>": num_ids - 1}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="w0"))
        made.add_special_tokens(["</s>"])
        made.save(str(tmp_path / "tokenizer.json"))
        chosen = {"tokenizer": str(tmp_path / "tokenizer.json"), "eos_token": "</s>"}
        settings = PrepSettings(name="web", engine="reference", dtype="auto", **chosen)
        assert shard_format(settings).dtype == dtype


def test_uint16_holds_the_same_ids_and_every_reader_takes_them(own: str, tmp_path: Path) -> None:
    wide = prepared(tmp_path, "wide", "--tokenizer", own)
    small = prepared(tmp_path, "small", "--tokenizer", own, "--set=prep.dtype=auto")
    assert (wide.dtype, small.dtype) == ("uint32", "uint16")
    assert documents(tmp_path, wide) == documents(tmp_path, small)
    for manifest in (wide, small):
        assert verify_manifest(manifest, deep=True) == []
    shards = [manifest.shard_path(manifest.shards[0]) for manifest in (wide, small)]
    assert open_shard(shards[1]).dtype == np.uint16
    assert np.load(shards[1], mmap_mode="r").tolist() == open_shard(shards[0]).tolist()
    streams = []
    for name in ("wide", "small"):
        run = {"data_path": str(tmp_path / "data" / name / "train"), "batch_size": 2, "seq_len": 16}
        for packing in ("concat", "best_fit"):
            loader = open_loader(run | {"packing": packing}, backend="numpy")
            streams.append(np.concatenate([inputs for inputs, _ in loader]))
    np.testing.assert_array_equal(streams[0], streams[2])
    np.testing.assert_array_equal(streams[1], streams[3])


@pytest.mark.parametrize(("form", "ending"), [("megatron", "bin"), ("olmo", "npy"), ("mds", "mds")])
def test_exports_of_uint16_shards_hold_the_same_ids(
    own: str, tmp_path: Path, form: Any, ending: str
) -> None:
    payloads = []
    for name, dtype in (("wide", "uint32"), ("small", "uint16")):
        manifest = prepared(tmp_path, name, "--tokenizer", own, f"--set=prep.dtype={dtype}")
        export(manifest.path, tmp_path / "out" / name, form)
        paths = sorted((tmp_path / "out" / name).glob(f"*.{ending}"))
        payloads.append([path.read_bytes() for path in paths])
        facts = json.loads((tmp_path / "out" / name / "export.json").read_text())
        assert facts["dtype"] == dtype
        if form == "megatron":
            (index,) = (tmp_path / "out" / name).glob("*.idx")
            assert index.read_bytes()[17] == {"uint32": 4, "uint16": 8}[dtype]
    if form != "mds":
        payloads[1] = [np.frombuffer(p, "<u2").astype("<u4").tobytes() for p in payloads[1]]
    assert payloads[0] == payloads[1]


def test_a_bos_starts_each_document_and_is_no_part_of_its_text(own: str, tmp_path: Path) -> None:
    manifest = prepared(tmp_path, "a", "--tokenizer", own, "--set=prep.bos_token=auto")
    plain = prepared(tmp_path, "b", "--tokenizer", own)
    assert manifest.extra["bos_token_id"] == load_tokenizer(own).eos_token_id - 1
    for (_, tokens), (_, others) in zip(documents(tmp_path, manifest), documents(tmp_path, plain)):
        assert tokens == [manifest.extra["bos_token_id"], *others]
    assert verify_manifest(manifest, deep=True) == []


def test_a_sample_is_read_by_the_tokenizer_of_the_shards_alone(
    own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(prepared(tmp_path, "a", "--tokenizer", own).path)
    other = str(prepared(tmp_path, "b").path)
    command = ("inspect", "--sample", "400", "--all", "--manifest")
    for samples in said(capsys, *command, path, "--tokenizer", own)["samples"].values():
        whole = "".join(sample["text"] for sample in samples)
        assert any("naïve 東京 and </s> " in sample["context"] for sample in samples), whole[:99]
    refused_line(capsys, *command, path, code="E-TOKENIZER-NAME")
    refused_line(capsys, *command, path, "--tokenizer", "cl100k_base", code="E-TOKENIZER-OTHER")
    refused_line(capsys, *command, other, "--tokenizer", own, code="E-TOKENIZER-OTHER")


def test_shards_stay_when_the_file_moves_and_change_with_its_eos(own: str, tmp_path: Path) -> None:
    prepared(tmp_path, "a", "--tokenizer", own)
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "tokenizer.json").write_bytes(Path(own).read_bytes())
    before = prepared(
        tmp_path, "a", "--tokenizer", str(moved), "--set=prep.eos_token=</s>"
    ).path.stat()
    assert (tmp_path / "data" / "a" / "train" / "manifest.json").stat() == before
    command = prep_command(tmp_path, "a", "--tokenizer", str(moved), "--set=prep.eos_token=<s>")
    assert main(command) == 1


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--tokenizer", "o200k_harmony", "--set=prep.dtype=uint16"], "E-TOKENIZER-DTYPE"),
        (["--tokenizer", "missing/tokenizer.json"], "E-TOKENIZER-FILE"),
        (["--set=prep.eos_token=<|none|>"], "E-TOKENIZER-SPECIAL"),
        (["--set=prep.bos_token=auto"], "E-TOKENIZER-SPECIAL"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], code: str
) -> None:
    refused_line(capsys, *prep_command(tmp_path, "a", *flags), code=code)
    assert not (tmp_path / "data").exists()


def test_a_dry_run_of_a_mixture_counts_the_bytes_of_ids_and_refuses_a_tokenizer_once(
    own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [jsonl_source(name, [{"text": text} for text in TEXTS]) for name in ("a", "b")]
    project = write_project(tmp_path, sources, {"tokenizer": own})
    command = ["prep-mixture", "--config", str(project.config), "--dry-run"]
    refused_line(capsys, *command, "--set=prep.eos_token=<none>", code="E-TOKENIZER-SPECIAL")
    for dtype, size in (("auto", 2.25), ("uint32", 4.25)):
        for part in said(capsys, *command, f"--set=prep.dtype={dtype}"):
            assert part["estimated_disk_bytes"] == int(size * part["estimated_tokens"])


def test_a_model_of_another_tokenizer_reads_the_text_of_documents(own: str, tmp_path: Path) -> None:
    manifest = prepared(tmp_path, "a")
    run_tokenizer = load_tokenizer("o200k_harmony")
    checkpoint = Path(own).parent
    chosen = TokenizerSettings()
    model = model_ids(chosen, checkpoint, 400)
    assert model is not None
    doc_ids = [i for file in shard_files(tmp_path / "data", manifest) for i in file.doc_ids()]
    corpus = Corpus(tmp_path / "data", run_tokenizer.eos_token_id, 12, model)
    seen = corpus.read(doc_ids[:5]).tokens
    rows = documents(tmp_path, manifest)[:5]
    texts = [run_tokenizer.decode(tokens[:-1]) for _, tokens in rows]
    expected = [row[:12].tolist() for row in load_tokenizer(own).rows(texts)]
    assert [tokens.tolist() for tokens in seen] == expected
    assert model_ids(chosen, tmp_path, 201_088) is None
    assert model_ids(chosen._replace(name=own), checkpoint, 400) is None


def trained(path: Path, own: str | None = None) -> Path:
    """A checkpoint whose weights pass for trained ones, perhaps with a tokenizer beside them."""
    make_tiny_checkpoint(path, family="llama", vocab_size=400, num_layers=1)
    config = json.loads((path / "config.json").read_text())
    del config["nmoe_recipe"]
    (path / "config.json").write_text(json.dumps(config))
    if own is not None:
        (path / "tokenizer.json").write_bytes(Path(own).read_bytes())
    return path


def test_a_trained_model_without_a_tokenizer_reads_no_ids_on_trust(
    own: str, tmp_path: Path
) -> None:
    settings = {"tokenizer": own, "backbone": {"checkpoint": "model"}}
    project = write_project(tmp_path, [jsonl_source("a", [{"text": TEXTS[0]}])], settings)
    model = project.directory / "model"
    make_tiny_checkpoint(model, family="llama", vocab_size=400, num_layers=1)
    require_checkpoints(project.run)  # random weights read any ids
    assert ids_for_model(project.run) is None
    shutil.rmtree(model)
    trained(model)
    for read in (require_checkpoints, ids_for_model):
        with refused("E-TOKENIZER-NAME"):
            read(project.run)
    shutil.rmtree(model)
    trained(model, own)
    require_checkpoints(project.run)
    assert ids_for_model(project.run) is None


def test_flags_that_name_another_tokenizer_than_the_shards_have_are_refused(
    own: str, tmp_path: Path
) -> None:
    prepared(tmp_path, "a", "--tokenizer", own)
    flags = {"root": str(tmp_path), "backbone.checkpoint": str(trained(tmp_path / "model", own))}
    with refused("E-HEAD-TOKENIZER"):  # without the flag, it is that of gpt-oss
        ids_for_model(Run(None, flags))
    assert ids_for_model(Run(None, {**flags, "tokenizer": own})) is None
