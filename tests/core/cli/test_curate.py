"""The commands of the diversity-ordering document, end to end on a small file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from nmoe_core.cli import main
from nmoe_core.plots.png import MAX_PNG_BYTES

TOPICS = {
    "sea": "wave tide harbour anchor sailor reef current storm vessel deck",
    "bread": "flour yeast oven crust dough salt knead butter baker loaf",
    "stars": "galaxy orbit comet nebula lens mirror light planet dust moon",
    "law": "court judge statute appeal clause verdict counsel bench trial plea",
}


def texts(num_records: int) -> list[str]:
    rng = np.random.default_rng(0)
    found = []
    for i in range(num_records):
        words = list(TOPICS.values())[i * len(TOPICS) // num_records].split()
        found.append(" ".join(rng.choice(words, rng.integers(5, 60))))
    return found


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedding table of the published vocabulary and 8 columns; no other weight."""
    directory = tmp_path_factory.mktemp("model")
    rows = torch.randn(201_088, 8, generator=torch.Generator().manual_seed(0))
    save_file({"embedding.weight": rows.bfloat16()}, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def training_data(tmp_path: Path) -> Path:
    path = tmp_path / "training_data.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(120)))
    return path


def curate(path: Path, model_dir: Path, *flags: str) -> int:
    output = path.with_name("training_data_curated.jsonl")
    flags = ("--n-clusters", "4", *flags)
    named = {"--input": path, "--output": output, "--model-dir": model_dir}
    return main(["curate", *[str(part) for pair in named.items() for part in pair], *flags])


def read(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def files(directory: Path) -> set[str]:
    return {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}


def is_whole(picture: Path) -> None:
    with Image.open(picture) as image:
        image.load()


def test_all_files_and_keys_of_the_document_are_made(training_data: Path, model_dir: Path, capsys):
    assert curate(training_data, model_dir, "--seq-len", "256") == 0
    assert {
        "training_data_curated.jsonl",
        "training_data_curated_embeddings.npy",
        "training_data_token_counts.npy",
        "training_data_curated_meta.json",
        "ordering_comparison.png",
        "cluster_cloud.png",
    } <= files(training_data.parent)
    meta = json.loads(training_data.with_name("training_data_curated_meta.json").read_text())
    assert {
        "input",
        "output",
        "input_count",
        "final_count",
        "n_clusters",
        "ordering",
        "sequence_length",
        "total_tokens",
        "n_training_sequences",
        "embedding_method",
        "load_embeddings_path",
        "pca",
        "token_window_diversity",
        "similarity_stats",
        "cluster_sizes",
    } <= set(meta)
    assert meta["input_count"] == meta["final_count"] == 120
    assert meta["ordering"] in ("golden", "window_fill"), "the one that `auto` took"
    assert list(meta["cluster_sizes"].values()) == sorted(meta["cluster_sizes"].values())[::-1]
    both = meta["token_window_diversity"]
    assert both["curated"]["mean"] > both["original"]["mean"]
    assert set(both["curated"]) == {"mean", "min", "max", "std", "n_sequences"}
    counts = np.load(training_data.with_name("training_data_token_counts.npy"))
    assert counts.dtype == np.int64
    assert meta["total_tokens"] == counts.sum()
    rows = np.load(training_data.with_name("training_data_curated_embeddings.npy"))
    assert rows.shape == (120, 8)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    named = {word for words in meta["cluster_terms"].values() for word in words}
    assert all(named & set(words.split()) for words in TOPICS.values())
    for picture in training_data.parent.glob("*.png"):
        assert picture.stat().st_size <= MAX_PNG_BYTES
        is_whole(picture)
    assert "% of it" in capsys.readouterr().out


def test_the_output_holds_the_lines_of_the_input_in_the_recorded_order(training_data, model_dir):
    curate(training_data, model_dir, "--no-plot")
    lines = read(training_data)
    order = np.load(training_data.with_name("training_data_curated_order.npy"))
    curated = read(training_data.with_name("training_data_curated.jsonl"))
    assert curated == [lines[i] for i in order]
    assert curated != lines
    assert not list(training_data.parent.glob("*.png"))


def test_stats_only_prints_and_writes_nothing(training_data: Path, model_dir: Path, capsys):
    before = files(training_data.parent)
    assert curate(training_data, model_dir, "--stats-only", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert files(training_data.parent) == before
    assert set(facts["diversity"]) == {"golden", "original", "shuffle"}


def test_two_runs_give_the_same_bytes(tmp_path: Path, model_dir: Path):
    outputs = []
    for name in ("a", "b"):
        path = tmp_path / name / "training_data.jsonl"
        path.parent.mkdir()
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(80)))
        for _ in range(2):  # the second finds everything made
            curate(path, model_dir, "--seq-len", "200")
        names = files(path.parent) - {"training_data_curated_meta.json"}
        outputs.append(
            {name: (path.parent / name).read_bytes() for name in names if ".lock" not in name}
        )
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("order", ["stratified", "round_robin", "related", "bin_packing"])
def test_other_orders_are_asked_for_by_name(training_data: Path, model_dir: Path, order: str):
    assert curate(training_data, model_dir, "--no-plot", "--order", order) == 0
    meta = json.loads(training_data.with_name("training_data_curated_meta.json").read_text())
    assert meta["ordering"] == {"stratified": "stratified_greedy"}.get(order, order)
    curated = read(training_data.with_name("training_data_curated.jsonl"))
    assert Counter(curated) == Counter(read(training_data))


def test_an_unknown_order_is_refused_before_anything_is_written(training_data, model_dir, capsys):
    before = files(training_data.parent)
    assert curate(training_data, model_dir, "--order", "best") == 1
    assert "E-CURATION-ORDER" in capsys.readouterr().err
    assert files(training_data.parent) == before


def test_calibrate_k_prints_both_rules_and_leaves_no_reordered_file(
    training_data: Path, model_dir: Path, capsys
):
    assert curate(training_data, model_dir, "--calibrate-k", "--seq-len", "300") == 0
    printed = capsys.readouterr().out
    assert "published rule" in printed
    assert "70 % of peak" in printed
    found = json.loads(
        training_data.with_name("training_data_curated_calibrate_k.json").read_text()
    )
    assert [result["k"] for result in found["results"]] == [5, 10, 15, 20, 25, 30, 40, 50, 75, 100]
    assert not training_data.with_name("training_data_curated.jsonl").exists()
    assert training_data.with_name("k_calibration.png").exists()


def test_loaded_embeddings_and_pca_stand_in_for_shallow_ones(training_data, model_dir, tmp_path):
    rng = np.random.default_rng(1)
    rows = np.repeat(rng.standard_normal((4, 40)), 30, axis=0) + 0.1 * rng.standard_normal(
        (120, 40)
    )
    rows[7] = np.nan
    np.save(tmp_path / "deep.npy", rows.astype(np.float16))
    flags = ("--load-embeddings", str(tmp_path / "deep.npy"), "--pca-components", "5", "--no-plot")
    assert curate(training_data, model_dir, *flags) == 0
    meta = json.loads(training_data.with_name("training_data_curated_meta.json").read_text())
    assert meta["pca"]["n_components"] == 5
    assert meta["pca"]["original_dim"] == 40
    assert 0.9 < meta["pca"]["explained_variance"] <= 1
    assert meta["load_embeddings_path"] == str(tmp_path / "deep.npy")
    assert meta["counts"]["not_finite_rows"] == 1
    assert sorted(meta["cluster_sizes"].values())[1:] in ([30, 30, 30], [30, 30, 31])


def test_loaded_embeddings_of_another_input_are_refused(training_data, model_dir, tmp_path, capsys):
    np.save(tmp_path / "deep.npy", np.zeros((119, 4), np.float32))
    before = files(tmp_path)
    assert curate(training_data, model_dir, "--load-embeddings", str(tmp_path / "deep.npy")) == 1
    assert "a row for each record" in capsys.readouterr().err
    assert files(tmp_path) == before


def test_lines_that_are_no_records_are_refused_or_set_aside(training_data, model_dir, capsys):
    lines = read(training_data)
    bad = [b"{torn", b"[1]", b'{"other": 1}', b'{"text": null}', b"\xff"]
    mixed = [*lines[:50], *bad, b"", b"   ", b'{"text": ""}', *lines[50:]]
    training_data.write_bytes(b"\n".join(mixed))
    before = files(training_data.parent)
    assert curate(training_data, model_dir, "--no-plot") == 1
    printed = capsys.readouterr().err
    assert "E-CURATION-LINE" in printed
    assert "line 51" in printed
    assert files(training_data.parent) == before
    assert curate(training_data, model_dir, "--no-plot", "--on-error", "set-aside") == 0
    curated = training_data.with_name("training_data_curated.jsonl").read_bytes()
    assert Counter(curated.splitlines()) == Counter([*lines, b'{"text": ""}'])
    assert read(training_data.with_name("training_data_curated_set_aside.jsonl")) == bad
    meta = json.loads(training_data.with_name("training_data_curated_meta.json").read_text())
    assert meta["counts"] | {"embedded_now": 0, "not_finite_rows": 0} == {
        "embedded_now": 0,
        "not_finite_rows": 0,
        "blank_lines": 2,
        "empty_texts": 1,
        "set_aside": 5,
        "eos_per_record": 1,
    }


def test_compare_says_how_far_two_spaces_agree(tmp_path: Path, capsys):
    rng = np.random.default_rng(2)
    rows = np.repeat(rng.standard_normal((5, 12)), 30, axis=0) + 0.1 * rng.standard_normal(
        (150, 12)
    )
    np.save(tmp_path / "a.npy", rows.astype(np.float32))
    np.save(tmp_path / "b.npy", rng.standard_normal((150, 70)).astype(np.float32))
    flags = ["--n-clusters", "5", "--json", "--plot", str(tmp_path / "comparison.png")]
    paths = {name: str(tmp_path / f"{name}.npy") for name in "ab"}
    assert main(["curate", "compare", "--shallow", paths["a"], "--deep", paths["a"], *flags]) == 0
    same = json.loads(capsys.readouterr().out)
    assert same["ari"] == pytest.approx(1)
    assert same["cka"] == pytest.approx(1)
    assert same["neighbour_overlap"] == 1
    assert same["verdict"] == "redundant"
    flags += ["--pca-deep-only", "20"]
    assert main(["curate", "compare", "--shallow", paths["a"], "--deep", paths["b"], *flags]) == 0
    apart = json.loads(capsys.readouterr().out)
    assert abs(apart["ari"]) < 0.1
    assert apart["verdict"] == "different"
    is_whole(tmp_path / "comparison.png")


def test_animate_ends_with_every_record(
    training_data: Path, model_dir: Path, tmp_path, monkeypatch
):
    curate(training_data, model_dir, "--seq-len", "256", "--no-plot")
    monkeypatch.setenv("PATH", "")  # no ffmpeg
    stem = str(tmp_path / "training_data")
    output = tmp_path / "ordering_animation.mp4"
    flags = ["--seq-len", "256", "--frames", "12", "--output", str(output)]
    flags += ["--embeddings", f"{stem}_curated_embeddings.npy"]
    assert main(["curate", "animate", *flags, "--token-counts", f"{stem}_token_counts.npy"]) == 0
    for name in ("ordering_animation.gif", "ordering_animation_umap.gif"):
        with Image.open(tmp_path / name) as film:
            assert getattr(film, "n_frames") > 8  # noqa: B009 (only films have it)


@pytest.mark.parametrize("part", ["", "animate", "embed", "compare", "calibrate-k"])
def test_what_is_missing_is_wrong_usage(part: str, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["curate", *part.split()])
    assert caught.value.code == 2
    assert "required" in capsys.readouterr().err


def test_tensor_parallelism_is_refused_with_the_reason(training_data, model_dir, tmp_path, capsys):
    flags = ["--input", str(training_data), "--output", str(tmp_path / "d.npy"), "--tp", "2"]
    assert main(["curate", "embed", *flags, "--model-dir", str(model_dir)]) == 1
    printed = capsys.readouterr().err
    assert "E-CONFIG-TP" in printed
    assert "--devices" in printed


def test_an_input_directory_that_cannot_be_written_is_refused_before_any_work(
    training_data: Path, model_dir: Path, tmp_path: Path, capsys
):
    out = tmp_path / "out"
    out.mkdir()
    with open(training_data, "rb") as file:  # /proc takes no file, not even from root
        named = Path(f"/proc/self/fd/{file.fileno()}")
        flags = ["--output", str(out / "curated.jsonl"), "--model-dir", str(model_dir)]
        run = ["curate", "--input", str(named), *flags, "--no-plot"]
        assert main(run) == 1
        assert "--token-counts" in capsys.readouterr().err
        assert files(out) == set()
        assert main([*run, "--token-counts", str(out / "counts.npy")]) == 0
    assert len(np.load(out / "counts.npy")) == 120
    assert len(read(out / "curated.jsonl")) == 120


@pytest.mark.parametrize("seq_len", [64, 256, 1024, 4096])
def test_a_window_without_an_order_never_gets_a_worse_one_than_golden(
    training_data: Path, model_dir: Path, capsys, seq_len: int
):
    def mean(*flags: str) -> tuple[float, str]:
        capsys.readouterr()
        assert curate(training_data, model_dir, "--seq-len", str(seq_len), "--json", *flags) == 0
        facts = json.loads(capsys.readouterr().out)
        return facts["token_window_diversity"]["curated"]["mean"], facts["ordering"]

    chosen, name = mean("--stats-only")
    each = {order: mean("--stats-only", "--order", order) for order in ("golden", "window_fill")}
    assert chosen == max(found for found, _ in each.values())
    assert name in {named for _, named in each.values()}
    assert mean("--stats-only", "--order", "auto") == (chosen, name)
