"""`[mixture.buckets]`: the buckets of curated documents, against the same grouping in Python."""

import json
import random
import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loader import open_loader
from loader.files.format import load_manifest
from loader.plan.file import load_plan
from loader.plan.mixture import Stage, StageSource
from loader.plan.phases import Phase
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.curate.buckets.definition import Column, Definition, escaped, merged
from nmoe_core.curate.buckets.stages import bucket_phases, bucket_stages, source_phases
from nmoe_core.curate.shards.lineage import verify_curated_shard
from nmoe_core.shards.documents import shard_files
from nmoe_core.shards.export.run import Form, export
from nmoe_core.shards.publish.send import publish
from nmoe_core.tasks import curate
from nmoe_core.tasks.checks import check_curated
from nmoe_core.tasks.selection.bucket_plan import bucket_paths
from nmoe_core.tasks.shards import require_selectable
from tests.core.curate.bucketed import (
    SETTINGS,
    SOURCES,
    WORDS,
    Row,
    bucket_project,
    bucket_rows,
    command,
    curated,
)
from tests.core.curate.corpus import Corpus
from tests.project import Project, contents, failing, json_lines, read_rows
from tests.refusals import refused

pytest.importorskip("duckdb")


def _set(project: Project, old: str, new: str) -> None:
    text = project.config.read_text()
    assert old in text
    project.config.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = bucket_project(tmp_path_factory.mktemp("buckets"))
    curated(made)
    return made


def _tokens(run: Run, path: Path) -> dict[str, np.ndarray]:
    """The tokens of each document of a manifest by id, in order."""
    found = {}
    for file in shard_files(path.parent, load_manifest(path)):
        for (start, end), (name, _) in zip(file.spans.tolist(), file.ids()):
            found[name] = np.array(file.tokens[start:end])
    return found


def _naive_buckets(run: Run) -> dict[str, list[str]]:
    """Ids of the kept documents of each bucket, in the order of the shards."""
    lengths = {s: _tokens(run, run.tree.manifest(s)) for s in SOURCES}
    rows = {s: {r["id"]: r for r in bucket_rows(s)} for s in SOURCES}
    words = {s: {k: len(r["text"].split()) for k, r in rows[s].items()} for s in SOURCES}
    kept = [(s, k) for s in SOURCES for k in lengths[s] if words[s][k] > 4]
    by_words = sorted(words[s][k] for s, k in kept for _ in range(len(lengths[s][k])))
    bounds = sorted({by_words[-(-len(by_words) * i // 3) - 1] for i in (1, 2)})

    cells: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for s, k in kept:
        lang = (rows[s][k]["lang"] or "none").replace("/", "~2F")
        part = 1 + sum(words[s][k] > bound for bound in bounds)
        cells[s, lang, f"q{part}"].append(k)

    def size(keys: list[Any]) -> int:
        return sum(len(lengths[c[0]][k]) for c in keys for k in cells[c])

    place: dict[Any, tuple[str, ...]] = {c: c for c in cells}
    for depth in (2, 1):
        groups = defaultdict(list)
        for c, to in place.items():
            groups[to].append(c)
        for group in groups.values():
            if size(group) < 200:
                place |= {c: (*c[:depth], "rest") for c in group}
    for s in SOURCES:
        groups = defaultdict(list)
        for c, to in place.items():
            if c[0] == s:
                groups[to].append(c)
        if 0 < size(groups[s, "rest"]) < 200:
            largest = max(groups, key=lambda to: size(groups[to]))
            place |= dict.fromkeys(groups[s, "rest"], largest)
    found: dict[str, set[str]] = defaultdict(set)
    for c, to in place.items():
        found["/".join(to)] |= set(cells[c])
    return {
        name: [k for k in lengths[name.split("/")[0]] if k in ids] for name, ids in found.items()
    }


def _sources(run: Run) -> dict[str, Path]:
    """The manifest of each source of the plan."""
    plan = load_plan(run.tree.plan)
    return {s.name: Path(plan.base) / s.manifest for s in plan.sources}


def test_the_sources_of_the_plan_are_the_buckets_of_a_naive_grouping(project: Project) -> None:
    run = project.run
    naive = _naive_buckets(run)
    made = {name: list(_tokens(run, path)) for name, path in _sources(run).items()}
    assert made == naive
    assert len(made) > 8
    assert {"web/en/q1", "books/de~2Fat/q1"} <= set(made)
    assert any(name.endswith("/rest") for name in made)
    for source in SOURCES:
        assert all(check.passed for check in check_curated(run, source).values())
        for shard in run.tree.shards(source, 2):
            verify_curated_shard(shard)


def _read(plan: Path, world: int, state: dict[str, Any] | None = None) -> list[tuple[str, bytes]]:
    """Source and tokens of all rows in order, read by `world` ranks, on request from a state on."""
    rows: dict[int, tuple[str, bytes]] = {}
    for rank in range(world):
        with open_loader(
            plan, rank=rank, world_size=world, backend="numpy", form="batch"
        ) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for batch in loader:
                names = [batch.source_names[i] for i in batch.source_index]
                for number, name, row in zip(batch.sequence_index, names, batch.inputs):
                    rows[int(number)] = name, row.astype(np.uint32).tobytes()
    return [rows[number] for number in sorted(rows)]


def test_phases_name_sources_and_buckets(project: Project) -> None:
    phase = {"start_step": 60, "dataset_weights": {"web": 1.0, "books": 0.0, "books/en/q1": 1.0}}
    run = Run(project.config, {"phases": [phase]})
    plan, _ = curate.planned_loader(run, SOURCES, [])
    before, after = plan.stages
    assert [source.name for source in before.sources] == [s.name for s in plan.sources]
    own = {source.name: source.weight for source in after.sources}
    books = [name for name in own if name.startswith("books/")]
    assert books == ["books/en/q1"]
    assert own["books/en/q1"] == pytest.approx(500_000, abs=20)
    assert len(own) == len([s for s in before.sources if s.name.startswith("web/")]) + 1
    with refused("E-CONFIG"):
        other = {"start_step": 60, "dataset_weights": {"web/other": 1.0}}
        curate.planned_loader(Run(project.config, {"phases": [other]}), SOURCES, [])
    preview = source_phases(run.loader.phases)
    assert dict(preview[0].weights) == {"web": 1.0, "books": 1.0}


def test_the_loader_reads_each_bucket_in_its_order_at_any_world_size(project: Project) -> None:
    run = project.run
    streams = {
        name: np.concatenate([*_tokens(run, path).values()]) for name, path in _sources(run).items()
    }
    found = [_read(run.tree.plan, world) for world in (1, 2, 4)]
    assert found[0] == found[1] == found[2]
    with open_loader(run.tree.plan, backend="numpy") as loader:
        for _ in range(7):
            next(loader)
        state = loader.state_dict()
    assert _read(run.tree.plan, 2, state) == found[0][7 * 4 :]
    by_name: dict[str, list[bytes]] = defaultdict(list)
    for name, row in found[0]:
        by_name[name].append(row)
    assert by_name.keys() == streams.keys()
    stride = load_plan(run.tree.plan).stride
    for name, rows_read in by_name.items():
        stream = streams[name].astype(np.uint32)
        starts = [k * stride for k in range(len(rows_read))]  # `wrap` reads the tokens as a circle
        expected = [np.take(stream, range(at, at + 16), mode="wrap").tobytes() for at in starts]
        assert Counter(rows_read) == Counter(expected)


def test_weights_are_shares_of_tokens_and_a_file_may_set_them(tmp_path: Path) -> None:
    project = bucket_project(tmp_path)
    run = curated(project)
    sizes = {n: load_manifest(path).total_tokens for n, path in _sources(run).items()}
    (stage,) = load_plan(run.tree.plan).stages
    for source in SOURCES:
        own = {s.name: s.weight for s in stage.sources if s.name.startswith(f"{source}/")}
        total = sum(sizes[name] for name in own)
        assert sum(own.values()) == pytest.approx(500_000, abs=20)
        for name, weight in own.items():
            assert weight == pytest.approx(500_000 * sizes[name] / total, abs=2)

    first, *others = sizes
    weights = {first: 3.0} | dict.fromkeys(others, 1.0)
    table = "".join(f"{json.dumps(name)} = {weight}\n" for name, weight in weights.items())
    (tmp_path / "weights.toml").write_text(f"[weights]\n{table}")
    weighted = Run(project.config, {"mixture.weights": str(tmp_path / "weights.toml")})
    curate.make_plan(weighted, SOURCES, [])
    (stage,) = load_plan(run.tree.plan).stages
    heaviest = max(stage.sources, key=lambda source: source.weight)
    assert heaviest.name == first
    assert heaviest.weight == pytest.approx(3 * min(s.weight for s in stage.sources), abs=3)
    (tmp_path / "weights.toml").write_text("[weights]\nweb = 1\nbooks = 1\n")
    with refused("E-MIX-WEIGHTS"):
        curate.make_plan(weighted, SOURCES, [])


def test_a_document_moves_bucket_and_only_its_buckets_change(tmp_path: Path) -> None:
    project = bucket_project(tmp_path)
    curated(project)
    before = contents(tmp_path / "out")
    curated(project)
    assert contents(tmp_path / "out") == before

    rows = bucket_rows("web")
    moved = next(i for i, row in enumerate(rows) if row["lang"] == "en" and len(row["text"]) > 90)
    rows[moved]["lang"] = "de/at"
    assert _changed_by(project, rows) == {"en", "de~2Fat"}
    rows.append({"id": "web-new", "text": " ".join(WORDS * 2), "lang": "fi"})
    assert _changed_by(project, rows) == {"rest"}  # the rare languages are merged
    found = contents(tmp_path / "out" / "mixture")
    assert found["buckets.json"] == before["mixture/buckets.json"]


def _changed_by(project: Project, rows: list[Row]) -> set[str]:
    """The language of each bucket of web that changes with new rows; each must be one bucket."""
    sources = _sources(project.run).items()
    digests = {name: load_manifest(path).content_digest() for name, path in sources}
    (project.directory / "in/web.jsonl").write_text(json_lines(rows))
    for verb in (["prep-mixture"], ["attributes"], ["hydra", "grade"]):
        command(project, *verb)
    curated(project)
    sources = _sources(project.run).items()
    after = {name: load_manifest(path).content_digest() for name, path in sources}
    assert after.keys() == digests.keys()
    changed = [name for name in after if after[name] != digests[name]]
    assert all(name.startswith("web/") for name in changed)
    languages = {name.split("/")[1] for name in changed}
    assert len(languages) == len(changed)
    return languages


def test_without_buckets_again_their_manifests_are_removed(tmp_path: Path) -> None:
    plain = {k: v for k, v in SETTINGS.items() if k != "mixture"}
    project = bucket_project(tmp_path, plain)
    curated(project)
    before = contents(tmp_path / "out", "*.npy")
    first = load_plan(project.run.tree.plan)
    project.config.write_text(
        project.config.read_text() + '\n[mixture.buckets]\nby = ["lang"]\nleast_tokens = 200\n'
    )
    run = curated(project)
    assert {s.name for s in load_plan(run.tree.plan).sources} > {"web/en", "books/en"}
    assert run.tree.bucket_manifests("web")
    _set(project, 'by = ["lang"]', "by = []")
    run = curated(project)
    assert contents(tmp_path / "out", "*.npy") == before
    assert load_plan(run.tree.plan).plan_hash == first.plan_hash
    assert not run.tree.bucket_manifests("web")


def test_another_refit_or_setting_defines_the_buckets_again(tmp_path: Path) -> None:
    from nmoe_core.tasks.selection.buckets import fit_buckets

    project = bucket_project(tmp_path)
    run = curated(project)
    assert fit_buckets(run, SOURCES).facts["changed"] is False
    assert fit_buckets(run, SOURCES, refit=True).facts["changed"] is False  # the same documents
    _set(project, "least_tokens = 200", 'least_tokens = "1K"')
    curated(project)
    sizes = [load_manifest(path).total_tokens for path in _sources(run).values()]
    assert min(sizes) >= 1000


def test_topics_and_scores_make_buckets_and_a_new_score_moves_one_document(corpus: Corpus) -> None:
    for bucket in range(2):
        corpus.grade(bucket)
    path = corpus.configure().path
    table = '[mixture.buckets]\nby = ["topic", "quality:3"]\nleast_tokens = 1\n'
    path.write_text(f"{path.read_text()}\n{table}")
    assert main(["curate", "shards", "--config", str(path)]) == 0
    run = Run(path)
    tree = corpus.tree
    scores: dict[str, float] = {}
    topics: dict[str, int] = {}
    for bucket in range(2):
        rows = read_rows(tree.shard("web", bucket).scores)
        found = np.load(tree.shard("web", bucket).topics).tolist()
        for name, row, topic in zip(corpus.ingest_ids(bucket), rows, found):
            if row["decision"] == "keep":
                scores[name] = row["aggregated"]
                topics[name] = topic
    lengths = {name: len(tokens) for name, tokens in _tokens(run, tree.manifest("web")).items()}
    by_score = sorted(scores[name] for name in scores for _ in range(lengths[name]))
    bounds = [by_score[-(-len(by_score) * i // 3) - 1] for i in (1, 2)]
    naive: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name, score in scores.items():
        part = 1 + sum(score > bound for bound in bounds)
        naive[str(topics[name]), f"q{part}"].add(name)

    def made() -> dict[tuple[str, str], set[str]]:
        parts = {}
        for name, manifest in bucket_paths(run, "web").items():
            _, topic, part = name.split("/")
            parts[topic.partition("-")[0], part] = set(_tokens(run, manifest))
        return parts

    assert made() == naive
    assert any("-" in name for name in bucket_paths(run, "web"))  # topics have their terms
    digests = {n: load_manifest(p).content_digest() for n, p in bucket_paths(run, "web").items()}
    definition = tree.buckets.read_bytes()

    movable = [name for name in scores if (str(topics[name]), "q3") in naive]
    moved = min(movable, key=lambda name: scores[name])
    old = next(key for key, names in naive.items() if moved in names)
    new = str(topics[moved]), "q3"
    number = next(bucket for bucket in range(2) if moved in corpus.ingest_ids(bucket))
    place = tree.shard("web", number).scores
    rows = read_rows(place)
    rows[corpus.ingest_ids(number).index(moved)]["aggregated"] = 0.99
    place.write_text(json_lines(rows))
    assert main(["curate", "shards", "--config", str(path)]) == 0
    naive[old].remove(moved)
    naive[new].add(moved)
    assert made() == {key: names for key, names in naive.items() if names}
    after = {n: load_manifest(p).content_digest() for n, p in bucket_paths(run, "web").items()}
    changed = {n for n in after.keys() | digests if after.get(n) != digests.get(n)}
    places = [name.split("/")[1:] for name in changed]
    assert sorted((topic.partition("-")[0], part) for topic, part in places) == sorted([old, new])
    assert tree.buckets.read_bytes() == definition


def test_a_stop_at_any_step_of_new_buckets_is_repaired_by_the_next_run(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")

    def made(name: str, steps: tuple[int, ...]) -> dict[str, bytes]:
        place = tmp_path / name
        shutil.copytree(project.directory, place)
        run = Run(place / "run.toml", {"mixture.buckets.by": ["n_words:2"]})
        for step in steps:
            with failing(f"rename:{step}:EIO"), pytest.raises(OSError, match="Input/output"):
                _make(run)
        _make(run)
        found = contents(place / "out" / "curated") | contents(place / "out" / "mixture")
        return {name: content for name, content in found.items() if not name.startswith(".")}

    whole = made("whole", ())
    assert made("stopped", (1, 2, 4, 6, 8, 9)) == whole
    assert any("bucket_q2" in name for name in whole)


def _make(run: Run) -> None:
    from nmoe_core.tasks.selection.buckets import put_in_buckets

    curate.define_buckets(run, SOURCES)
    for source in SOURCES:
        put_in_buckets(run, source, range(2))
        curate.curate_shards(run, source, range(2))
        curate.combine(run, source)
    curate.make_plan(run, SOURCES, [])


@pytest.mark.parametrize("form", ["megatron", "parquet"])
def test_an_exported_bucket_has_the_columns_of_its_own_documents(
    project: Project, tmp_path: Path, form: Form
) -> None:
    run = project.run
    languages = {row["id"]: row["lang"] for row in bucket_rows("web")}
    for name, path in bucket_paths(run, "web").items():
        export(path, tmp_path / name, form)
        ids: list[str] = []
        for file in sorted((tmp_path / name).glob("*.parquet")):
            rows = pq.read_table(file)
            own = rows.column("ingest_id" if form == "megatron" else "id").to_pylist()
            assert rows.column("lang").to_pylist() == [languages[one] for one in own]
            ids += own
        assert ids == list(_tokens(run, path))


def test_published_buckets_are_streamed_each_with_its_own_checksums(
    project: Project, tmp_path: Path
) -> None:
    plan = load_plan(project.run.tree.plan)
    sent = publish(project.run.tree.plan, (tmp_path / "store").as_uri())
    assert len([*(tmp_path / "store").rglob("blocks_bucket_*.json")]) == len(plan.sources)
    rows = []
    streamed = {"cache_dir": tmp_path / "cache", "cache_bytes": 10**8}
    for where, options in ((project.run.tree.plan, {}), (sent.facts["url"], streamed)):
        with open_loader(where, backend="numpy", form="batch", **options) as loader:
            rows.append([batch.inputs.tolist() for batch in loader])
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("by", "code"),
    [
        ('["nothing"]', "E-SELECT-EXPRESSION"),
        ('["lang:4"]', "E-BUCKETS-COLUMN"),
        ('["language.lang"]', "E-SELECT-EXPRESSION"),
        ('["decision:4"]', "E-BUCKETS-COLUMN"),
    ],
)
def test_a_column_that_cannot_make_buckets_is_refused(project: Project, by: str, code: str) -> None:
    from nmoe_core.tasks.selection.buckets import fit_buckets

    run = Run(project.config, {"mixture.buckets.by": json.loads(by)})
    with refused(code):
        fit_buckets(run, SOURCES)
    if by != '["lang:4"]':  # the types of passthrough columns are known after prep
        with refused(code):
            require_selectable(run)
    require_selectable(project.run)


@pytest.mark.parametrize(
    "settings",
    [
        {"mixture.buckets.by": ["lang", "lang:3"]},
        {"mixture.buckets.by": ["n_words:1"]},
        {"mixture.buckets.by": ["n_words:x"]},
        {"mixture.buckets.least_tokens": "many"},
        {"curation.order": "window_fill"},
        {"curation.stability": "resume", "curation.resume_from_token": {"web": 1}},
    ],
)
def test_settings_that_contradict_buckets_are_refused(
    project: Project, settings: dict[str, Any]
) -> None:
    with refused("E-CONFIG"):
        Run(project.config, settings)


def test_small_combinations_are_merged_from_the_last_part() -> None:
    sizes = {("a", "q1"): 10, ("a", "q2"): 3, ("a", "q3"): 4, ("b", "q1"): 2, ("c", "q1"): 3}
    placed = merged(sizes, 5)
    assert placed[("a", "q1")] == ("a", "q1")
    assert placed[("a", "q2")] == placed[("a", "q3")] == ("a", "rest")
    assert placed[("b", "q1")] == placed[("c", "q1")] == ("rest",)
    assert set(merged(sizes, 6).values()) == {("a", "q1"), ("a", "rest")}  # joins the largest
    assert set(merged(sizes, 100).values()) == {("rest",)}
    assert merged({}, 5) == {}
    rng = random.Random(3)
    for _ in range(300):
        cells: dict[tuple[str, ...], int] = {
            (rng.choice("abc"), rng.choice("de"), rng.choice("fgh")): rng.randrange(40)
            for _ in range(rng.randrange(1, 12))
        }
        placed = merged(cells, 30)
        totals: Counter[Any] = Counter()
        for cell, bucket in placed.items():
            totals[bucket] += cells[cell]
        assert placed.keys() == cells.keys()
        assert min(totals.values()) >= 30 or len(totals) == 1
        for cell, size in cells.items():
            assert size < 30 or placed[cell] == cell or cell not in placed.values()


def test_names_of_values_differ_and_fit_into_paths() -> None:
    values = ["", "none", "rest", "q1", ".", "..", "a/b", "a~2Fb", "~6Eone", "é", "A b", "x" * 99]
    values += ["x" * 98, "=", "~", "q", "q1x"]
    names = [escaped(value) for value in values]
    assert len(set(names)) == len(names)
    assert not {"none", "rest", "q1", ""} & set(names)
    assert all(set(name) <= set(map(chr, range(33, 127))) - set('/+"\\') for name in names)
    assert all(len(name) <= 40 and name[0] != "." for name in names)


def test_quantiles_and_values_of_columns_name_missing_values() -> None:
    number = Column("a.x", 3, (1.0, 2.0))
    found = number.names(pa.chunked_array([[0.5, 1.0, 1.5], [2.0, 9.0, None, float("nan")]]))
    assert found.tolist() == ["q1", "q1", "q2", "q2", "q3", "none", "none"]
    times = Column("a.t", 2, (float(2**60),))  # nanoseconds, which a float64 rounds
    assert times.names(pa.array([2**60 - 9999, 2**60 + 9999, None])).tolist() == [
        "q1",
        "q2",
        "none",
    ]
    text = Column("a.y", terms={"3": "3-sea"})
    assert text.names(pa.array([3, None, 4])).tolist() == ["3-sea", "none", "4"]
    assert text.names(pa.array([True, None])).tolist() == ["true", "none"]
    assert text.names(pa.chunked_array([], pa.string())).tolist() == []
    assert text.names(pa.nulls(2)).tolist() == number.names(pa.nulls(2)).tolist() == ["none"] * 2


def test_a_new_combination_belongs_to_the_bucket_with_the_most_parts_in_common() -> None:
    buckets = {"a/x": "a/x", "b/x": "b/x", "b/y": "b/rest", "b/z": "b/rest"}
    columns = Column("t.a"), Column("t.b")
    found = Definition(columns, {"web": buckets, "new": {}})
    table = pa.table({"t.a": ["a", "b", "c", "b", None], "t.b": ["w", "w", "x", "z", "x"]})
    assert found.buckets("web", table) == ["a/x", "b/rest", "a/x", "b/rest", "a/x"]
    assert found.buckets("new", table) == ["rest"] * 5
    assert Definition.of_payload(json.loads(json.dumps(found.payload()))) == found


def test_stages_and_phases_name_buckets_in_place_of_sources() -> None:
    sizes = {"a": {"a/x": 30, "a/y": 10}, "b": {"b/z": 5}}
    sources = (StageSource("a", 4.0, max_epochs=2), StageSource("b", 1.0))
    (stage,) = bucket_stages([Stage("pretrain", "mix", 100, sources)], sizes)
    assert [(s.name, s.weight, s.max_epochs) for s in stage.sources] == [
        ("a/x", 3.0, 2),
        ("a/y", 1.0, 2),
        ("b/z", 1.0, 0),
    ]
    hot = tuple(StageSource(s.name, s.weight**0.5, s.weight) for s in sources)
    (tempered,) = bucket_stages([Stage("pretrain", "mix", 100, hot, 2.0)], sizes)
    assert [s.untempered for s in tempered.sources] == [3.0, 1.0, 1.0]
    assert tempered.sources[0].weight == pytest.approx(3**0.5 * tempered.sources[1].weight)
    (phase,) = bucket_phases([Phase(5, {"a": 8.0, "b/z": 7.0})], sizes)
    assert phase.weights == {"a/x": 6.0, "a/y": 2.0, "b/z": 7.0}
    (both,) = bucket_phases([Phase(5, {"a/y": 0.0, "a": 8.0})], sizes)
    assert both.weights == {"a/x": 6.0, "a/y": 0.0}
