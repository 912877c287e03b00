"""The commands of the diversity-ordering document, end to end on a small file."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from nmoe_core.cli import main
from nmoe_core.curate.diversity.measure import window_topics
from nmoe_core.curate.shards.planning import AUTO_ORDERS
from nmoe_core.report.plots.png import MAX_PNG_BYTES
from tests.project import contents, failing, json_lines, said

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


@dataclass
class Data:
    """A file of records, the model, and the command that orders them."""

    path: Path
    model: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def directory(self) -> Path:
        return self.path.parent

    def curate(self, *flags: str) -> int:
        named = {"--input": self.path, "--output": self.made(".jsonl"), "--model-dir": self.model}
        paths = [str(part) for pair in named.items() for part in pair]
        return main(["curate", *paths, "--n-clusters", "4", *flags])

    def facts(self, *flags: str) -> dict[str, Any]:
        self.capsys.readouterr()
        assert self.curate("--json", *flags) == 0
        return json.loads(self.capsys.readouterr().out)

    def refused(self, *flags: str) -> str:
        """The error of the command, which must leave all files as they are."""
        before = files(self.directory)
        assert self.curate(*flags) == 1
        assert files(self.directory) == before
        return self.capsys.readouterr().err

    def made(self, ending: str) -> Path:
        return self.path.with_name(f"training_data_curated{ending}")

    def meta(self) -> dict[str, Any]:
        return json.loads(self.made("_meta.json").read_text())


@pytest.fixture
def data(tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]) -> Data:
    path = tmp_path / "training_data.jsonl"
    path.write_text(json_lines({"text": text} for text in texts(120)))
    return Data(path, model_dir, capsys)


def read(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def files(directory: Path) -> set[str]:
    return {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}


def is_whole(picture: Path) -> None:
    with Image.open(picture) as image:
        image.load()


def test_all_files_and_keys_of_the_document_are_made(data: Data) -> None:
    assert data.curate("--seq-len", "256") == 0
    endings = (".jsonl", "_embeddings.npy", "_meta.json")
    assert all(data.made(ending).is_file() for ending in endings)
    names = {"training_data_token_counts.npy", "ordering_comparison.png", "cluster_cloud.png"}
    assert names <= files(data.directory)
    meta = data.meta()
    keys = "input output input_count final_count n_clusters ordering sequence_length total_tokens "
    keys += "n_training_sequences embedding_method load_embeddings_path pca cluster_sizes "
    keys += "token_window_diversity similarity_stats"
    assert set(keys.split()) <= set(meta)
    assert meta["input_count"] == meta["final_count"] == 120
    assert meta["ordering"] in ("golden", "window_fill", "stratified_greedy")
    assert list(meta["cluster_sizes"].values()) == sorted(meta["cluster_sizes"].values())[::-1]
    both = meta["token_window_diversity"]
    assert both["curated"]["mean"] > both["original"]["mean"]
    assert set(both["curated"]) == {"mean", "min", "max", "std", "n_sequences"}
    counts = np.load(data.path.with_name("training_data_token_counts.npy"))
    assert counts.dtype == np.int64
    assert meta["total_tokens"] == counts.sum()
    num_windows = -(-int((counts + 1).sum()) // 256)  # an EOS follows each record
    assert meta["n_training_sequences"] == num_windows
    labels, order = (np.load(data.made(f"_{name}.npy")) for name in ("labels", "order"))
    flushed = window_topics(labels[order], counts[order] + 1, 256, "flush")
    assert both["curated"]["n_sequences"] == len(flushed) >= num_windows
    assert (both["curated"]["min"], both["curated"]["max"]) == (flushed.min(), flushed.max())
    assert both["curated"]["mean"] == pytest.approx(flushed.mean(), abs=0.005)
    assert both["curated"]["std"] == pytest.approx(flushed.std(), abs=0.005)
    sizes = np.bincount(labels, minlength=4)
    assert meta["cluster_sizes"] == {str(k): size for k, size in enumerate(sizes.tolist())}
    assert meta["clusters"]["fitted_on"] == 120
    rows = np.load(data.made("_embeddings.npy"))
    assert rows.shape == (120, 8)
    cosines = (rows @ rows.T)[np.triu_indices(120, 1)]
    found = meta["similarity_stats"]
    assert found["total_pairs_sampled"] == len(cosines) == 120 * 119 // 2
    assert found["high_sim_pairs_gt_0.9"] == (cosines > 0.9).sum() > 0
    for name, of in (("mean", np.mean), ("std", np.std), ("median", np.median)):
        assert found[name] == pytest.approx(of(cosines), abs=1e-5)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    named = {word for words in meta["cluster_terms"].values() for word in words}
    assert all(named & set(words.split()) for words in TOPICS.values())
    for picture in data.directory.glob("*.png"):
        assert picture.stat().st_size <= MAX_PNG_BYTES
        is_whole(picture)
    assert "% of it" in data.capsys.readouterr().out
    lines, curated = read(data.path), read(data.made(".jsonl"))
    assert curated == [lines[i] for i in np.load(data.made("_order.npy"))] != lines
    assert not data.facts("--stats-only")["is_refitted"]
    assert data.facts("--stats-only", "--refit")["is_refitted"]


def test_a_second_run_which_embeds_and_fits_nothing_writes_the_same_bytes(data: Data) -> None:
    assert data.curate() == 0
    before = contents(data.directory)
    facts = data.facts()
    assert (facts["embedded_now"], facts["is_refitted"]) == (0, False)
    assert contents(data.directory) == before


def test_stats_only_prints_and_writes_nothing(data: Data) -> None:
    before = files(data.directory)
    facts = data.facts("--stats-only")
    assert files(data.directory) == before
    assert set(facts["diversity"]) == {"golden", "original", "shuffle"}


@pytest.mark.parametrize("order", ["stratified", "round-robin", "related", "bin_packing"])
def test_other_orders_are_asked_for_by_name(data: Data, order: str) -> None:
    assert data.curate("--no-plot", "--order", order) == 0
    meta = data.meta()
    assert meta["ordering"] == {"stratified": "stratified_greedy"}.get(order, order).replace(
        "-", "_"
    )
    assert Counter(read(data.made(".jsonl"))) == Counter(read(data.path))
    assert not list(data.directory.glob("*.png"))


def test_calibrate_k_prints_both_rules_and_leaves_no_reordered_file(data: Data) -> None:
    assert data.curate("--calibrate-k", "--seq-len", "300") == 0
    printed = data.capsys.readouterr().out
    assert "published rule" in printed
    assert "70 % of peak" in printed
    found = json.loads(data.made("_calibrate_k.json").read_text())
    assert [result["k"] for result in found["results"]] == [5, 10, 15, 20, 25, 30, 40, 50, 75, 100]
    assert not data.made(".jsonl").exists()
    assert data.path.with_name("k_calibration.png").exists()
    data.made("_calibrate_k.json").unlink()
    flags = ["--input", str(data.path), "--model-dir", str(data.model), "--seq-len", "300"]
    for verb in (["curate", "calibrate-k"], ["curate", "--calibrate-k"]):
        assert main([*verb, *flags, "--no-plot"]) == 0
        data.path.with_name(f"{data.path.stem}_curated_calibrate_k.json").unlink()


def test_loaded_embeddings_and_pca_stand_in_for_shallow_ones(data: Data) -> None:
    rng = np.random.default_rng(1)
    rows = np.repeat(rng.standard_normal((4, 40)), 30, axis=0) + 0.1 * rng.standard_normal(
        (120, 40)
    )
    rows[7] = np.nan
    deep = data.directory / "deep.npy"
    np.save(deep, rows.astype(np.float16))
    flags = ("--load-embeddings", str(deep), "--pca-components", "5", "--no-plot")
    assert data.curate(*flags) == 1
    printed = data.capsys.readouterr().err
    assert "E-CURATION-EMBEDDING" in printed
    assert "1 of 120 rows, the first is row 7" in printed
    assert not data.made(".jsonl").exists()
    assert data.curate(*flags, "--on-error", "set-aside") == 0
    meta = data.meta()
    assert meta["pca"]["n_components"] == 5
    assert meta["pca"]["original_dim"] == 40
    assert 0.9 < meta["pca"]["explained_variance"] <= 1
    assert meta["load_embeddings_path"] == str(deep)
    assert meta["counts"]["not_finite_rows"] == 1
    assert sorted(meta["cluster_sizes"].values())[1:] in ([30, 30, 30], [30, 30, 31])


def test_an_unknown_order_and_embeddings_of_another_input_are_refused(data: Data) -> None:
    assert "E-CURATION-ORDER" in data.refused("--order", "best")
    np.save(data.directory / "deep.npy", np.zeros((119, 4), np.float32))
    flags = ("--load-embeddings", str(data.directory / "deep.npy"))
    printed = data.refused(*flags)
    assert "(119, 4)" in printed
    assert "[120, any]" in printed


def test_lines_that_are_no_records_are_refused_or_set_aside(data: Data) -> None:
    lines = read(data.path)
    bad = [b"{torn", b"[1]", b'{"other": 1}', b'{"text": null}', b"\xff"]
    mixed = [*lines[:50], *bad, b"", b"   ", b'{"text": ""}', *lines[50:]]
    data.path.write_bytes(b"\n".join(mixed))
    printed = data.refused("--no-plot")
    assert "E-CURATION-LINE" in printed
    assert "line 51" in printed
    assert data.curate("--no-plot", "--on-error", "set-aside") == 0
    curated = data.made(".jsonl").read_bytes()
    assert Counter(curated.splitlines()) == Counter([*lines, b'{"text": ""}'])
    assert read(data.made("_set_aside.jsonl")) == bad
    counts = {"blank_lines": 2, "empty_texts": 1, "set_aside": 5, "eos_per_record": 1}
    assert counts.items() <= data.meta()["counts"].items()


def test_compare_says_how_far_two_spaces_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(2)
    rows = np.repeat(rng.standard_normal((5, 12)), 30, axis=0) + 0.1 * rng.standard_normal(
        (150, 12)
    )
    np.save(tmp_path / "a.npy", rows.astype(np.float32))
    np.save(tmp_path / "b.npy", rng.standard_normal((150, 70)).astype(np.float32))
    flags = ["--n-clusters", "5", "--plot", str(tmp_path / "comparison.png")]
    paths = {name: str(tmp_path / f"{name}.npy") for name in "ab"}
    same = said(capsys, "curate", "compare", "--shallow", paths["a"], "--deep", paths["a"], *flags)
    assert [same[name] for name in ("ari", "nmi", "cka")] == pytest.approx([1, 1, 1])
    assert same["neighbour_overlap"] == 1
    assert same["verdict"] == "redundant"
    flags += ["--pca-deep-only", "20"]
    apart = said(capsys, "curate", "compare", "--shallow", paths["a"], "--deep", paths["b"], *flags)
    assert abs(apart["ari"]) < 0.1
    assert apart["neighbour_overlap"] < 0.15
    assert apart["verdict"] == "different"
    is_whole(tmp_path / "comparison.png")


def test_animate_ends_with_every_record(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    data.curate("--seq-len", "256", "--no-plot")
    monkeypatch.setenv("PATH", "")  # no ffmpeg
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    stem = str(data.directory / "training_data")
    output = data.directory / "ordering_animation.mp4"
    flags = ["--seq-len", "256", "--frames", "12", "--output", str(output)]
    flags += ["--embeddings", f"{stem}_curated_embeddings.npy"]
    assert main(["curate", "animate", *flags, "--token-counts", f"{stem}_token_counts.npy"]) == 0
    for name in ("ordering_animation.gif", "ordering_animation_umap.gif"):
        with Image.open(data.directory / name) as film:
            assert getattr(film, "n_frames") > 8  # noqa: B009 (only films have it)


@pytest.mark.parametrize("part", ["", "animate", "embed", "compare", "calibrate-k"])
def test_what_is_missing_is_wrong_usage(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["curate", *part.split()])
    assert caught.value.code == 2
    assert "required" in capsys.readouterr().err


def test_tensor_parallelism_is_refused_with_the_reason(data: Data) -> None:
    flags = ["--input", str(data.path), "--output", str(data.directory / "d.npy"), "--tp", "2"]
    assert main(["curate", "embed", *flags, "--model-dir", str(data.model)]) == 1
    printed = data.capsys.readouterr().err
    assert "E-CONFIG-TP" in printed
    assert "--devices" in printed


def test_an_input_directory_that_cannot_be_written_is_refused_before_any_work(data: Data) -> None:
    out = data.directory / "out"
    out.mkdir()
    with open(data.path, "rb") as file:  # /proc takes no file, not even from root
        named = Path(f"/proc/self/fd/{file.fileno()}")
        flags = ["--output", str(out / "curated.jsonl"), "--model-dir", str(data.model)]
        run = ["curate", "--input", str(named), *flags, "--no-plot"]
        assert main(run) == 1
        assert "--token-counts" in data.capsys.readouterr().err
        assert files(out) == set()
        assert main([*run, "--token-counts", str(out / "counts.npy")]) == 0
    assert len(np.load(out / "counts.npy")) == 120
    assert len(read(out / "curated.jsonl")) == 120


@pytest.mark.parametrize("loader", ["concat", "flush"])
@pytest.mark.parametrize("seq_len", [64, 256, 1024, 4096])
def test_a_window_without_an_order_gets_the_best_of_those_that_auto_tries(
    data: Data, seq_len: int, loader: str
) -> None:
    def mean(*flags: str) -> tuple[float, str]:
        facts = data.facts("--seq-len", str(seq_len), "--loader", loader, *flags)
        (name,) = set(facts["diversity"]) - {"original", "shuffle"}
        return facts["diversity"][name][loader]["mean"], name

    chosen, name = mean("--stats-only")
    each = {order: mean("--stats-only", "--order", order) for order in AUTO_ORDERS}
    assert chosen == max(found for found, _ in each.values())
    assert name in {named for _, named in each.values()}
    assert mean("--stats-only", "--order", "auto") == (chosen, name)


def killed_at(data: Data, failpoint: str = "") -> int:
    """Curate in a process of its own, killed at the failpoint if one is named."""
    command = [sys.executable, "-m", "nmoe_core", "curate", "--n-clusters", "3", "--seq-len", "200"]
    command += ["--input", data.path.name, "--output", data.made(".jsonl").name]
    command += ["--model-dir", str(data.model)]
    env = os.environ | {"NMOE_FAILPOINT": f"{failpoint}:kill" if failpoint else ""}
    return subprocess.run(command, env=env, cwd=data.directory).returncode


def committed(data: Data) -> dict[str, Any]:
    """Files, and the metadata without what its run still had to do."""
    found: dict[str, Any] = {
        name: (data.directory / name).read_bytes()
        for name in files(data.directory)
        if not name.endswith(".lock")
    }
    if (name := data.made("_meta.json").name) in found:
        meta = json.loads(found[name])
        found[name] = {key: meta[key] for key in meta if key not in ("counts", "clusters")}
    return found


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> dict[str, Any]:
    """What a run that is not killed commits."""
    path = tmp_path_factory.mktemp("whole") / "training_data.jsonl"
    path.write_text(json_lines({"text": text} for text in texts(60)))
    data = Data(path, model_dir, None)
    assert killed_at(data) == 0
    return committed(data)


def test_a_curation_that_a_full_disk_ended_makes_the_same_bytes_when_run_again(data: Data) -> None:
    assert data.curate() == 0
    whole = committed(data)
    for name in files(data.directory) - {data.path.name}:
        (data.directory / name).unlink()
    with failing("rename:4:ENOSPC"):
        assert data.curate() == 1
    assert committed(data).keys() < whole.keys()
    assert data.curate() == 0
    assert committed(data) == whole


# In the embedding cache, between clusters and arrays, in the reordered file, among the pictures.
_SLOW = ["fsync:1", "fsync:2", *(f"rename:{n}" for n in (1, 2, 6, 8, 10, 11, 12))]


@pytest.mark.parametrize(
    "failpoint",
    [
        pytest.param("rename:4", marks=pytest.mark.long),
        *(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW),
    ],
)
def test_a_killed_curation_ends_with_the_same_bytes_when_run_again(
    data: Data, whole: dict[str, Any], failpoint: str
) -> None:
    data.path.write_text(json_lines({"text": text} for text in texts(60)))
    assert killed_at(data, failpoint) == -signal.SIGKILL
    left, meta, output = committed(data), data.made("_meta.json").name, data.made(".jsonl").name
    if meta in left:  # committed last, so everything that it speaks of is there
        assert {name: left[name] for name in whole} == whole
    assert left.get(output, whole[output]) == whole[output]
    assert killed_at(data) == 0
    assert committed(data) == whole
