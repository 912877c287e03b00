import base64
import functools
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from nmoe_core.curate.diversity.compare import compare_embeddings
from nmoe_core.curate.pictures import compared_picture, order_picture
from nmoe_core.curate.topics.clusters import flat_projection
from nmoe_core.report.plots import (
    calibration_plot,
    cloud_plot,
    columns_plot,
    copies_plot,
    head_tail_plot,
    k_plot,
    kept_picture,
    loss_plot,
    manifest_plot,
    png_markdown,
    share_plot,
    sources_plot,
)
from nmoe_core.report.plots.animation import OrderFilm, draw_bar, draw_plane, write_films
from nmoe_core.report.plots.png import (
    MAX_PNG_BYTES,
    cluster_colors,
    cluster_name,
    palette,
    short_count,
)

SUMMARY = {
    "keep_curve": [[k / 100, 1 - k / 100] for k in range(1, 100)],
    "tau_drop": 0.3,
    "tau_keep": 0.6,
    "reliability": [
        {"judge_mean": k / 10, "oracle_mean": k / 11, "oracle_keep_rate": float(k > 5)}
        for k in range(1, 11)
    ],
    "count": 200,
}


def lengths(num_documents: int) -> np.ndarray:
    return np.random.default_rng(1).lognormal(6, 1.3, num_documents).astype(np.int64) + 1


TERMS = [["import", "class"], ["дом"], ["東京", "city"], [], ["a" * 40]]


def ordered(num_documents: int, num_clusters: int, before: str = "original") -> tuple:
    """Clusters, lengths, and two orders of the documents."""
    rng = np.random.default_rng(0)
    clusters = rng.integers(0, num_clusters, num_documents)
    tokens = rng.lognormal(5, 1, num_documents).astype(np.int64) + 2
    after = "after" if before == "before" else "golden"
    source_order = np.argsort(clusters, kind="stable")
    return clusters, tokens, {before: source_order, after: np.arange(num_documents)}


def curated(num_documents: int, num_topics: int, seq_len: int) -> bytes:
    return order_picture(*ordered(num_documents, num_topics, "before"), seq_len, "topics")


def cloud(num_points: int, num_clusters: int) -> bytes:
    rng = np.random.default_rng(2)
    labels = rng.integers(0, num_clusters, num_points)
    return cloud_plot(rng.standard_normal((num_points, 2)) + labels[:, None] % 7, labels, TERMS)


def compared() -> bytes:
    rows = np.random.default_rng(3).standard_normal((80, 6)).astype(np.float32)
    return compared_picture(compare_embeddings(rows, rows[:, :4], 5, 0), 0)


def k_results(reachable: int | None) -> dict:
    results = [{"k": k, "silhouette": 1 / k, "reachable": min(1, 30 / k)} for k in (5, 10, 30, 100)]
    return {"results": results, "within_5pct": 5, "reachable": reachable}


DRAWINGS = {
    "shares": lambda: share_plot(*ordered(3000, 30), TERMS),
    "shares of many": lambda: share_plot(*ordered(3000, 200)),
    "shares of one": lambda: share_plot(*ordered(1, 1)),
    "head and tail": lambda: head_tail_plot(*ordered(3000, 30), 2048, TERMS),
    "head and tail of one": lambda: head_tail_plot(*ordered(1, 1), 2048),
    "cloud": lambda: cloud(400, 6),
    "cloud, large": lambda: cloud(30_000, 45),
    "cloud of one": lambda: cloud(1, 1),
    "two clouds": compared,
    "k": lambda: k_plot(k_results(30)),
    "k, none reachable": lambda: k_plot(k_results(None)),
    "manifest": lambda: manifest_plot(lengths(5000), [70, 0, 80], "web"),
    "manifest of many shards": lambda: manifest_plot(lengths(5000), lengths(1024)),
    "manifest of one document": lambda: manifest_plot([7], [7]),
    "manifest of nothing": lambda: manifest_plot([], [0, 0]),
    "manifest without shards": lambda: manifest_plot([], []),
    "calibration": lambda: calibration_plot(SUMMARY),
    "curated": lambda: curated(500, 12, 2048),
    "curated, large": lambda: curated(100_000, 1000, 512),
    "curated, one document": lambda: curated(1, 1, 4096),
    "curated, nothing kept": lambda: curated(0, 1, 4096),
    "loss": lambda: loss_plot({"probe": [[1, 0.5], [2, 0.1]], "judge": [[1, 0.4], [9, 0.2]]}),
    "loss of one step": lambda: loss_plot({"probe": [[1, 0.5]]}),
    "loss that reaches zero": lambda: loss_plot({"probe": [[1, 0.5], [2, 0.0]]}),
    "loss of nothing": lambda: loss_plot({"probe": []}),
}


@functools.cache
def first_drawn(name: str) -> tuple[bytes, Figure]:
    """A picture, and the figure that was saved as it."""
    figures, save = list[Figure](), Figure.savefig

    def saved(figure: Figure, *arguments: object, **options: object) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", saved)
        png = DRAWINGS[name]()
    (figure,) = figures
    return png, figure


@pytest.mark.parametrize("name", DRAWINGS)
def test_pictures_are_small_pngs_of_1600_pixels_with_the_same_bytes_each_time(name: str):
    png, _ = first_drawn(name)
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    assert picture.width == 1600
    assert 600 <= picture.height <= 1100
    assert len(png) <= MAX_PNG_BYTES
    assert len(picture.getcolors(2**20) or ()) > 2
    assert DRAWINGS[name]() == png


@pytest.mark.parametrize("name", DRAWINGS)
def test_no_legend_covers_the_data(name: str):
    _, figure = first_drawn(name)
    for axes in figure.axes:
        if (legend := axes.get_legend()) is not None:
            box = legend.get_window_extent()
            assert not box.overlaps(axes.get_window_extent())
            assert figure.bbox.padded(1).contains(*box.p0)
            assert figure.bbox.padded(1).contains(*box.p1)


def test_texts_in_any_script_are_drawn_with_letters_that_the_font_has(
    monkeypatch: pytest.MonkeyPatch,
):
    texts = ["東京", "कमल", "مرحبا", "ไทย", "дом", "Straße", "東京", "凍京"]
    figure = drawn(monkeypatch, "columns", lambda: columns_plot({"名": texts}, "詩"))
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    # Two texts that are written alike are two bars.
    assert [names.count("DongJing"), len(names), {"дом", "Straße"} < {*names}] == [2, 7, True]
    assert len({bar.get_y() for bar in figure.axes[0].patches}) == 7
    shown = "".join([*names, figure.axes[0].get_title("left"), figure.get_suptitle()])
    assert all(ord(letter) < 0x530 for letter in shown)
    assert all(name.strip() for name in names)


@pytest.mark.parametrize(("exact", "most"), [(0, 1.0), (20, 52.5)])
def test_shares_of_copies_begin_at_zero_also_where_there_are_none(
    exact: int, most: float, monkeypatch: pytest.MonkeyPatch
):
    rows = [{"source": "web", "documents": 40, "exact": exact, "near": 0}]
    figure = drawn(monkeypatch, "charts", partial(copies_plot, rows))
    assert figure.axes[0].get_xlim() == (0, most)


def test_sources_are_compared_over_common_bins_by_share(monkeypatch: pytest.MonkeyPatch):
    sources = {"web": {"n": [1, 2, 2, None]}, "law": {"n": [9.0] * 50}, "none": {"n": []}}
    figure = drawn(monkeypatch, "columns", lambda: sources_plot(sources, "signals"))
    steps = [patch.get_data() for patch in figure.axes[0].patches]
    assert [round(step.values.sum()) for step in steps] == [100, 100, 0]
    assert all((step.edges == steps[0].edges).all() for step in steps)
    assert (steps[0].edges.min(), steps[0].edges.max()) == (1, 9)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*sources]
    empty = drawn(monkeypatch, "columns", lambda: sources_plot({"web": {"lang": ["en"]}}, ""))
    assert empty.axes[0].texts[0].get_text() == "no number"


@pytest.mark.parametrize(("most", "is_log"), [(900, False), (60_000, True)])
def test_counts_of_many_sizes_have_a_log_axis_so_that_one_long_document_hides_none(
    most: int, is_log: bool, monkeypatch: pytest.MonkeyPatch
):
    lengths = [0, *range(20, 120), most]
    sources = {"web": {"n": lengths}, "law": {"n": [30] * 9}}
    across = drawn(monkeypatch, "columns", lambda: sources_plot(sources, "signals")).axes[0]
    alone = drawn(monkeypatch, "columns", lambda: columns_plot({"n": lengths}, "signals")).axes[0]
    for axes in (across, alone):
        assert (axes.get_xscale() == "symlog") is is_log
    step = across.patches[0].get_data()
    assert step.values.sum() == pytest.approx(100)
    assert sum(alone.patches[0].get_data().values) == len(lengths)
    if is_log:
        assert np.count_nonzero(step.values) > 4


def test_settings_of_the_user_neither_reach_the_picture_nor_change():
    plain = loss_plot({"probe": [[1, 0.5], [2, 0.1]]})
    with matplotlib.rc_context({"figure.facecolor": "red", "font.size": 30, "savefig.dpi": 20}):
        before = dict(matplotlib.rcParams)
        assert loss_plot({"probe": [[1, 0.5], [2, 0.1]]}) == plain
        assert dict(matplotlib.rcParams) == before


def test_a_picture_shows_its_numbers():
    assert DRAWINGS["curated"]() != curated(500, 11, 2048)
    assert DRAWINGS["calibration"]() != calibration_plot(SUMMARY | {"tau_keep": 0.61})
    assert manifest_plot([5, 6], [11]) != manifest_plot([5, 7], [12])


def drawn(monkeypatch: pytest.MonkeyPatch, module: str, draw: Callable[[], bytes]) -> Figure:
    """The figure that a picture is rendered from."""
    figure = Figure()
    monkeypatch.setattr(f"nmoe_core.report.plots.{module}.render", lambda fill, *_: fill(figure))
    draw()
    return figure


@pytest.mark.parametrize(("last", "scale"), [(1.05, "linear"), (0.05, "log")])
def test_losses_within_a_power_of_ten_have_a_linear_axis(
    monkeypatch: pytest.MonkeyPatch, last: float, scale: str
):
    losses = [[1, 1.4], [2, 1.1], [3, last]]
    figure = drawn(monkeypatch, "charts", lambda: loss_plot({"probe": losses}))
    assert figure.axes[0].get_yscale() == scale


def test_topics_without_documents_have_no_row(monkeypatch: pytest.MonkeyPatch):
    clusters, tokens = np.array([2, 2, 7]), np.array([5, 5, 5])
    orders = {"before": np.array([2, 1, 0]), "after": np.arange(3)}
    for plot, more in ((share_plot, ()), (head_tail_plot, (4,))):
        draw = partial(plot, clusters, tokens, orders, *more)
        axes = drawn(monkeypatch, "clusters", draw).axes[0]
        assert sorted(label.get_text() for label in axes.get_yticklabels()) == ["2", "7"]


def test_texts_of_pictures_are_short_and_drawable():
    head, data = png_markdown(b"\x89PNG", "order [web]\nbefore").split("base64,")
    assert head == "![order (web) before](data:image/png;"
    assert base64.b64decode(data.removesuffix(")")) == b"\x89PNG"
    counts = [0, 999, 2000, 3_140_000, 1.5e9, 2e12]
    assert [short_count(value) for value in counts] == ["0", "999", "2k", "3.14M", "1.5B", "2T"]
    names = [cluster_name(k, TERMS) for k in range(6)]
    assert names == ["0  import, class", "1  дом", "2  DongJing, city", "3", "4", "5"]


def test_the_largest_cluster_has_the_first_colour_and_clusters_have_different_ones():
    colors = cluster_colors(np.array([2] * 5 + [0] * 3 + [1]))
    assert np.array_equal(colors[[2, 1]], palette()[[0, 2]])
    assert len(np.unique(palette(), axis=0)) == 60


def test_points_in_the_plane_follow_the_rows():
    rows = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32) * [9, 5, *[1] * 6]
    points, method = flat_projection(rows.astype(np.float32), 0, "pca")
    assert (points.shape, method) == ((50, 2), "pca")
    assert abs(np.corrcoef(points[:, 0], rows[:, 0])[0, 1]) > 0.95
    assert flat_projection(rows[:1].astype(np.float32), 0, "pca")[0].tolist() == [[0, 0]]


def film(num_records: int) -> OrderFilm:
    clusters, *_ = ordered(num_records, 5)
    return OrderFilm(
        labels=clusters,
        points=np.random.default_rng(2).standard_normal((num_records, 2)),
        order=np.random.default_rng(1).permutation(num_records),
        window=np.arange(num_records) // 4,
        counts=np.full(-(-num_records // 4), 3),
        original_mean=1.5,
    )


def pixels(figure: Figure) -> set[tuple[int, ...]]:
    """Colours inside a figure's first axes."""
    file = io.BytesIO()
    figure.savefig(file, format="rgba")
    width, height = figure.canvas.get_width_height()
    array = np.frombuffer(file.getvalue(), np.uint8).reshape(height, width, 4)[::-1, :, :3]
    left, bottom, right, top = figure.axes[0].bbox.extents.round().astype(int)
    return {tuple(pixel) for pixel in array[bottom:top, left:right].reshape(-1, 3).tolist()}


@pytest.mark.parametrize("num_records", [1, 7, 700, 5003])
def test_films_begin_with_no_record_in_its_colour_and_end_with_all(num_records: int):
    shown = film(num_records)
    bright = (255 * cluster_colors(shown.labels)[:, :3]).astype(np.uint8)
    bright = {tuple(bright[label].tolist()) for label in shown.labels}
    for drawing, always in ((draw_bar, set()), (draw_plane, {(255, 255, 255)})):
        figure = Figure()
        draw = drawing(figure, shown)
        draw(0)
        assert not pixels(figure) & bright
        draw(num_records // 2)
        draw(num_records)
        assert pixels(figure) - always == bright
        assert "100 %" in figure.axes[0].get_title(loc="center")


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_films_are_written_with_the_same_bytes_each_time(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("imageio_ffmpeg")
    monkeypatch.setenv("PATH", "")  # no ffmpeg of the system
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        paths = write_films(film(50), tmp_path / name / f"film{suffix}", 5)
        assert [path.name for path in paths] == [f"film{suffix}", f"film_umap{suffix}"]
        assert sorted((tmp_path / name).iterdir()) == paths
        made.append([path.read_bytes() for path in paths])
    assert made[0] == made[1]
    mark = b"GIF89a" if suffix == ".gif" else b"ftyp"
    assert all(mark in content[:12] for content in made[0])


@pytest.mark.parametrize("damage", [None, b"", b"\xff\n![x](y)"])
def test_a_kept_picture_is_drawn_again_only_where_what_it_shows_changed(
    tmp_path: Path, damage: bytes | None
) -> None:
    path, drawn = tmp_path / "a" / "b.md", list[str]()

    def picture(made_from: object) -> str:
        def draw() -> str:
            drawn.append(f"![{made_from}](x)\n\n![2](y)")
            return drawn[-1]

        return kept_picture(path, made_from, draw)

    first = picture(["web", 1])
    assert [picture(["web", 1]), len(drawn)] == [first, 1]
    assert picture(["web", 2]) != first
    if damage is not None:
        path.write_bytes(damage)
    assert [picture(["web", 2]), len(drawn)] == [drawn[1], 2 if damage is None else 3]
