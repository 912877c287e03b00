"""Attributes as assets: a partition per shard, checked, and duplicates over all sources."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from loader.files.format import load_manifest
from nmoe_assets.component import build_definitions
from nmoe_assets.partitions import range_tags
from nmoe_core.attributes import CODES
from nmoe_core.attributes.attribute import open_shard_documents
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.shards.documents import shard_files
from nmoe_core.tasks import checks
from nmoe_core.tasks.attributes import make_attributes
from nmoe_core.tasks.curate import combine, make_plan
from nmoe_core.tasks.graph import settings
from nmoe_core.tasks.report import summary
from nmoe_core.tasks.report.pictures import picture_of
from nmoe_core.tasks.shards import each_shard
from nmoe_core.text.tokenizer import load_tokenizer
from tests.project import Project, jsonl_source, write_project
from tests.refusals import refused

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("numba")
pytestmark = pytest.mark.filterwarnings("ignore:Parameter `backfill_policy`")
RULE = "is_survivor and stars > 3"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Two prepared sources, of which the second has a copy of each document of the first."""
    texts = [f"number {i} is the number of document {i} " * 12 for i in range(20)]
    rows = [{"id": f"d{i}", "text": text} for i, text in enumerate(texts)]
    attributes = {"use": ["duplicates"], "files": {"own": "own.parquet"}}
    settings = {
        "attributes": attributes,
        "duplicates": {"priority": ["books"], "jaccard": 1.0},
        "curation": {"where": RULE},
    }
    sources = [jsonl_source("web", rows), jsonl_source("books", rows)]
    project = write_project(tmp_path, sources, settings)
    assert main(["prep-mixture", "--config", str(project.config)]) == 0
    pq.write_table(pa.table({"doc_id": ["a"], "stars": [1]}), tmp_path / "own.parquet")
    return project


def _made(run: Run, keys: list[dg.AssetKey]) -> dg.ExecuteInProcessResult:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job = build_definitions(run).resolve_job_def("curate")
        with dg.DagsterInstance.ephemeral() as instance:
            return job.execute_in_process(
                asset_selection=keys, instance=instance, tags=range_tags(["0000", "0001"])
            )


def test_attributes_and_duplicates_are_made_and_checked_as_assets(project: Project) -> None:
    run = project.run
    own = [
        dg.AssetKey([s, "attributes", n]) for s in ("web", "books") for n in ("signatures", "own")
    ]
    copies = dg.AssetKey(["curation", "duplicates"])
    rows = [dg.AssetKey([s, "attributes", "duplicates"]) for s in ("web", "books")]
    done = _made(run, [*own, copies])
    made = [event.materialization for event in done.get_asset_materialization_events()]
    assert {(tuple(one.asset_key.path), one.partition) for one in made} == {
        *((tuple(key.path), part) for key in [*own, *rows] for part in ("0000", "0001")),
        (tuple(copies.path), None),
    }
    evaluated = done.get_asset_check_evaluations()
    assert {one.asset_key for one in evaluated} == {*own, copies}
    assert all(one.passed for one in evaluated)
    assert "data:image/png" in picture_of(run, "web/attributes/own", "0001")
    kept = {
        source: [
            row["exact_of"]
            for shard in run.tree.shards(source, 2)
            for row in pq.read_table(shard.attribute("duplicates")).to_pylist()
        ]
        for source in ("web", "books")
    }
    assert kept["books"] == [None] * 20
    assert sorted(kept["web"]) == sorted(f"books//d{i}" for i in range(20))
    (page,) = [one.metadata for one in made if one.asset_key == copies]
    assert "data:image/png" in picture_of(run, "curation/duplicates")
    assert isinstance(page["copies"], dg.TableMetadataValue)
    assert [record.data for record in page["copies"].records] == [
        {"source": "web", "documents": "20", "exact": "20", "near": "0"},
        {"source": "books", "documents": "20", "exact": "0", "near": "0"},
    ]


def test_states_are_an_asset_of_shards_and_backbone_that_no_rule_reads(project: Project) -> None:
    pytest.importorskip("torch")
    use = ["embedding", "perplexity"]
    more = {"attributes.use": use, "backbone.kind": "tiny", "curation.where": "perplexity > 0"}
    run = project.run.with_settings(
        {**more, "attributes.embedding.max_tokens": 8, "attributes.files": {}}
    )
    states = dg.AssetKey(["web", "attributes", "embedding"])
    backbone = dg.AssetKey(["hydra", "backbone"])
    graph = build_definitions(run).resolve_asset_graph()
    read = graph.get(dg.AssetKey(["web", "selection"])).parent_keys
    assert graph.get(states).parent_keys == {backbone, dg.AssetKey(["web", "shards"])}
    assert states not in read
    assert dg.AssetKey(["web", "attributes", "perplexity"]) in read
    done = _made(run, [backbone, states])
    assert all(one.passed for one in done.get_asset_check_evaluations())
    made = [event.materialization for event in done.get_asset_materialization_events()]
    assert {one.partition for one in made if one.asset_key == states} == {"0000", "0001"}


def test_curated_shards_follow_the_copies_where_their_order_can_spread_them(
    project: Project,
) -> None:
    copies, curated = dg.AssetKey(["curation", "duplicates"]), dg.AssetKey(["web", "curated"])
    for order, is_followed in (("golden", True), ("shuffle", False)):
        defined = build_definitions(project.run.with_settings({"curation.order": order}))
        parents = defined.resolve_asset_graph().get(curated).parent_keys
        assert (copies in parents) == is_followed


def test_code_versions_of_attributes_follow_their_settings_and_evaluations(
    project: Project, tmp_path: Path
) -> None:
    questions = tmp_path / "questions.jsonl"
    run = project.run.with_settings({"contamination.evaluations": {"q": questions.name}})
    names = ("contamination", "duplicates", "signals")

    def changed(other: Run) -> list[str]:
        now = {name: settings.attribute(other, name).version for name in names}
        return [name for name in names if now[name] != before[name]]

    before = {name: settings.attribute(run, name).version for name in names}
    assert changed(run.with_settings({"duplicates.jaccard": 0.8})) == ["duplicates"]
    questions.write_text('{"question": "which"}\n')
    assert changed(run) == ["contamination"]
    before = {name: settings.attribute(run, name).version for name in names}
    questions.rename(tmp_path / "moved.jsonl")
    moved = run.with_settings({"contamination.evaluations": {"q": "moved.jsonl"}})
    assert changed(moved) == []


def test_the_selection_depends_on_attributes_and_curated_shards_depend_on_it(
    project: Project,
) -> None:
    graph = build_definitions(project.run).resolve_asset_graph()
    selection = dg.AssetKey(["web", "selection"])
    parents = {tuple(key.path) for key in graph.get(selection).parent_keys}
    assert parents == {
        *(("web", name) for name in ("shards", "quality_scores")),
        *(("web", "attributes", name) for name in ("own", "duplicates")),
        ("curation", "duplicates"),
    }
    of_topics = build_definitions(project.run.with_settings({"curation.where": "topic != 3"}))
    read = of_topics.resolve_asset_graph().get(selection).parent_keys
    assert dg.AssetKey(["web", "topics"]) in read
    assert selection in graph.get(dg.AssetKey(["web", "curated"])).parent_keys
    without = build_definitions(project.run.with_settings({"curation.where": None}))
    assert selection not in without.resolve_asset_graph().get_all_asset_keys()
    of_one = {"curation.where": None, "curation.where_by_source": {"web": "topic != 3"}}
    by_source = build_definitions(project.run.with_settings(of_one)).resolve_asset_graph()
    made = {key for key in by_source.get_all_asset_keys() if key.path[-1] == "selection"}
    assert made == {selection}
    assert dg.AssetKey(["web", "topics"]) in by_source.get(selection).parent_keys


def _rated(project: Project, stars: list[float | None]) -> Run:
    """The run with these stars for its documents, in the order of their shards."""
    run = project.run
    shards = [shard for name in ("web", "books") for shard in run.tree.shards(name, 2)]
    opened = [open_shard_documents(shard) for shard in shards]
    ids = [doc_id for one in opened for doc_id in one.documents.doc_ids]
    rated = {"doc_id": ids, "stars": pa.array((stars * len(ids))[: len(ids)], pa.float64())}
    pq.write_table(pa.table(rated), run.base / "own.parquet")
    assert main(["attributes", "--config", str(project.config), "--only", "own"]) == 0
    return run


def _found(run: Run, name: str) -> tuple[bool, str]:
    verdict = checks.check_attribute_of_all(run, "own", ["web", "books"])[name]
    return verdict.passed, verdict.found


@pytest.mark.parametrize(
    ("stars", "settings", "found"),
    [
        ([1.0, None], {}, "finite"),
        ([1.0, float("nan")], {}, "such as nan"),
        ([1.0, float("inf")], {}, "such as inf"),
        ([1.0, 6.0], {"own.stars": (1, 5)}, "outside 1 to 5"),
        ([1.0, 5.0], {"own.stars": (1, 5)}, "finite"),
        ([1.0], {"own.star": (1, 5)}, "not a column of numbers"),
        ([1.0], {"stars": (1, 5)}, "unknown attribute"),
    ],
)
def test_numbers_outside_their_range_do_not_pass(
    project: Project, stars: list[float | None], settings: dict[str, Any], found: str
) -> None:
    run = _rated(project, stars).with_settings({"checks.ranges": settings})
    passed, said = _found(run, "ranges")
    assert found in said
    assert passed == (found == "finite")


def test_numbers_of_odd_texts_are_within_their_ranges(tmp_path: Path) -> None:
    """Words of n-grams that overlap count once for each: the share of a rule line is above 1."""
    texts = ["= " * 300, "...." * 90, "a" * 400, "# # #\n" * 60, "\u2022 \n" * 200]
    rows = [{"id": f"d{i}", "text": text} for i, text in enumerate(texts)]
    settings = {"attributes": {"use": ["signals"]}}
    project = write_project(tmp_path, [jsonl_source("web", rows)], settings)
    assert main(["prep-mixture", "--config", str(project.config)]) == 0
    assert main(["attributes", "--config", str(project.config)]) == 0
    assert checks.check_attribute_of_all(project.run, "signals", ["web"])["ranges"].passed


def test_drift_is_the_share_of_values_that_moved_from_the_version_before(project: Project) -> None:
    assert "no earlier" in _found(_rated(project, [1.0, 2.0, 3.0, 4.0]), "drift")[1]
    assert _found(_rated(project, [1.0, 2.0, 3.0, 4.0]), "drift")[0]
    passed, found = _found(_rated(project, [4.0]), "drift")
    assert not passed
    assert "of stars changed" in found
    run = project.run.with_settings({"checks.max_drift": 1.0})
    assert _found(run, "drift")[0]
    assert summary.sample_attribute(run, "web", "own", 0) == []
    _rated(project, [2.0, 7.0])
    rows = summary.sample_attribute(run, "web", "own", 0)
    assert "](data:image/png;base64," in picture_of(run, "web/attributes/own", "0000")
    assert [rows[0]["stars"], rows[-1]["stars"]] == [2.0, 7.0]
    assert all(str(row["doc_id"]).startswith("web//") for row in rows)


def test_rows_of_other_documents_or_damaged_rows_do_not_pass(project: Project) -> None:
    run = project.run
    assert main(["attributes", "--config", str(project.config)]) == 0
    assert checks.check_attribute(run, "web", "own", [0, 1])["rows"].passed
    one, other = (run.tree.shard("web", bucket).attribute("own") for bucket in (0, 1))
    payload = other.read_bytes()
    other.write_bytes(one.read_bytes())
    found = checks.check_attribute_of_all(run, "own", ["books", "web"])["rows"]
    assert (found.passed, "E-ATTRIBUTE" in found.found or "other documents" in found.found) == (
        False,
        True,
    )
    other.write_bytes(payload[: len(payload) // 2])
    assert not checks.check_attribute(run, "web", "own", [1])["rows"].passed
    other.unlink()
    assert not checks.check_attribute(run, "web", "own", [1])["rows"].passed


def test_newer_code_of_an_attribute_is_a_new_code_version_of_its_assets(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> list[str | None]:
        graph = build_definitions(project.run).resolve_asset_graph()
        names = (["web", "attributes", "signatures"], ["curation", "duplicates"])
        return [graph.get(dg.AssetKey(name)).code_version for name in names]

    before = found()
    monkeypatch.setitem(CODES, "signatures", "signatures/next")
    assert [now == then for now, then in zip(found(), before)] == [False, True]


def test_the_plan_shows_the_signals_and_the_composition_of_all_sources(own_project: Path) -> None:
    plan, sources = dg.AssetKey(["mixture", "loader_plan"]), ("code", "docs", "notes")
    rules = {"attributes.use": ["signals"], "curation.where": "n_words >= 40"}
    run = Run(own_project / "run.toml").with_settings(rules)
    (shown,) = _made(Run(own_project / "run.toml"), [plan]).get_asset_materialization_events()
    drawn = picture_of(Run(own_project / "run.toml"), "mixture/loader_plan")
    assert "account of the run" in drawn
    assert "signals of" not in drawn, "no rule reads signals"
    rows = [record.data for record in shown.materialization.metadata["account"].records]
    assert {"name": "steps", "unit": "steps", "kind": "total"}.items() <= rows[-1].items()
    for source in sources:
        make_attributes("signals", run, source, (0, 1))
        for task in ("select", "curate"):
            assert all(one.result for one in each_shard(run, task, source, ("0000", "0001")))
        combine(run, source)
    (shown,) = _made(run, [plan]).get_asset_materialization_events()
    page = shown.materialization.metadata
    drawn = picture_of(run, "mixture/loader_plan")
    assert "data:image/png" in drawn
    assert "signals of 3 sources" in drawn
    rows = [record.data for record in page["composition"].records]
    assert {row["name"] for row in rows if row["kind"] == "source"} == {*sources}
    assert {row["kind"] for row in rows} >= {"source", "topic"}
    shutil.rmtree(run.tree.shard("docs", 1).selection.parent)
    (shown,) = _made(run, [plan]).get_asset_materialization_events()
    page = shown.materialization.metadata
    assert "selection.parquet: attribute file is missing" in str(page["not_shown"].value)
    assert "composition" not in page


def test_contamination_over_its_limit_stops_the_plan(own_project: Path) -> None:
    run, sources = Run(own_project / "run.toml"), ("code", "docs", "notes")
    curated = load_manifest(run.tree.shard("docs", 0).curated_manifest)
    [file, *_] = shard_files(run.tree.curated, curated)
    tokens = max((tokens for _, tokens, _ in file.documents()), key=len)
    questions = own_project / "questions.jsonl"
    text = load_tokenizer(run.tokenizer).decode(tokens[:-1])
    questions.write_text(json.dumps({"question": text}), "utf-8")
    wanted = {"contamination.evaluations": {"asked": questions.name}, "contamination.max_share": 0}
    with refused("E-CONFIG-MISSING", naming=["[attributes] use"]):
        make_plan(run.with_settings(wanted), sources, ("docs",))
    limited = run.with_settings({**wanted, "attributes.use": ["contamination"]})
    with refused("E-ATTRIBUTE-MISSING"):
        make_plan(limited, sources, ("docs",))
    for source in sources:
        make_attributes("contamination", limited, source, (0, 1))
    with refused("E-CONTAMINATION-SHARE", naming=["docs", "asked", "at most 0.0000%"]):
        make_plan(limited, sources, ("docs",))
    assert not checks.check_contamination(limited, "docs")["contamination"].passed
    allowed = limited.with_settings({"contamination.max_share": 0.9})
    found = checks.check_contamination(allowed, "docs")["contamination"]
    assert found.passed
    assert 0 < found.facts["share"] < 0.9
    assert make_plan(allowed, sources, ("docs",)).digest
    keys = build_definitions(limited).resolve_asset_graph().asset_check_keys
    assert sum(key.name == "contamination" for key in keys) == len(sources)
    questions.write_text(json.dumps({"question": text + " more"}), "utf-8")
    with refused("E-ATTRIBUTE-STALE", naming=["other evaluations"]):
        make_plan(allowed, sources, ("docs",))
