"""The graph says what a run makes: before it is made, for each setting, input and disturbance."""

import json
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.base.compute.limited import LimitedProcess
from nmoe_core.base.errors import ConfigError
from nmoe_core.config.run import Run
from nmoe_core.config.schema import run_keys
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks.graph.records import record_of
from nmoe_core.tasks.preview import plan_run, require_plan
from nmoe_core.tasks.report.write import write_report
from tests.core.tasks.graph.world import (
    JOBS,
    copied,
    look,
    make_all,
    not_current,
    small_world,
    written_by,
)
from tests.project import Project, json_lines, output_of, read_rows, said
from tests.refusals import refused

pytest.importorskip("torch")

# Another value of each key that decides an output, and the outputs that are surely made again.
CHANGES: dict[str, tuple[Any, set[str]]] = {
    "tokenizer": ("cl100k_base", {"shards", "oracle_labels", "student"}),
    "seed": (7, {"topic_model", "topics", "curated", "curated_manifest", "loader_plan"}),
    "seq_len": (16, {"curated", "curated_manifest", "loader_plan"}),
    "batch_size": (4, {"loader_plan"}),
    "policy": ("least_consumed", {"loader_plan"}),
    "prep.min_doc_tokens": (9, {"shards"}),
    "prep.max_doc_tokens": (20, {"shards"}),
    "prep.long_documents": ("cut", set()),
    "prep.version": ("v2", {"shards"}),
    "prep.bos_token": ("<|startoftext|>", {"shards"}),
    "transforms": (({"kind": "base64_blobs"},), {"shards"}),
    "oracle.max_doc_tokens": (24, {"oracle_labels", "student"}),
    "oracle.max_documents": (20, {"oracle_labels"}),
    "backbone.seed": (3, {"backbone"}),
    "calibration.target_keep": (0.3, {"calibration", "quality_scores", "curated"}),
    "calibration.max_false_drop": (0.4, {"calibration", "quality_scores", "curated"}),
    "calibration.target_unit": ("tokens", {"calibration", "quality_scores", "curated"}),
    "calibration.family.pattern": (r"(\w)$", {"student", "calibration", "quality_scores"}),
    "calibration.target_by": ("source", {"calibration", "quality_scores", "curated"}),
    "duplicates.jaccard": (0.9, {"duplicates"}),
    "duplicates.priority": (("web",), {"duplicates"}),
    "duplicates.contained": (0.8, {"duplicates"}),
    "duplicates.count_copies": (True, {"duplicates"}),
    "duplicates.repeated_tokens": (20, {"duplicates"}),
    "duplicates.count_licences": (True, {"duplicates"}),
    "attributes.embedding.layers": (("final",), {"embedding"}),
    "attributes.embedding.pooling": ("last", {"embedding"}),
    "attributes.embedding.max_tokens": (5, {"embedding"}),
    "backbone.dtype": ("bfloat16", {"embedding"}),
    "curation.where": ("n_words > 9", {"selection", "curated"}),
    "curation.where_by_source": ({"web": "n_words > 9"}, {"selection", "curated"}),
    "curation.repeat": ("2", {"selection"}),
    "curation.topics_from": ("backbone", {"topic_model", "topics", "curated"}),
    "curation.num_topics": (5, {"topic_model", "topics", "curated"}),
    "curation.sample_documents": (200, {"topic_model", "topics", "curated"}),
    "curation.order": ("shuffle", {"curated", "curated_manifest", "loader_plan"}),
    "curation.epoch": (2, {"curated", "curated_manifest", "loader_plan"}),
    "curation.seq_len": (24, {"curated"}),
}
# The same of a run whose heads grade.
HEADS: dict[str, tuple[Any, set[str]]] = {
    "heads.max_ctx": (12, {"probe_head", "judge_head", "calibration", "quality_scores"}),
    "heads.seed": (5, {"probe_head", "judge_head", "calibration", "quality_scores"}),
    "heads.probe.lr": (1e-2, {"probe_head", "calibration", "quality_scores"}),
    "heads.probe.epochs": (2, {"probe_head", "calibration", "quality_scores"}),
    "heads.probe.batch_size": (64, {"probe_head", "calibration", "quality_scores"}),
    "heads.probe.tap": (2, {"probe_head", "calibration", "quality_scores"}),
    "heads.judge.lr": (1e-3, {"judge_head", "calibration", "quality_scores"}),
    "heads.judge.epochs": (2, {"judge_head", "calibration", "quality_scores"}),
    "heads.judge.batch_size": (64, {"judge_head", "calibration", "quality_scores"}),
    "heads.judge.tap": (3, {"judge_head", "calibration", "quality_scores"}),
    "heads.judge.mid_dim": (32, {"judge_head", "calibration", "quality_scores"}),
    "heads.judge.num_heads": (2, {"judge_head", "calibration", "quality_scores"}),
    "heads.judge.ffn_dim": (64, {"judge_head", "calibration", "quality_scores"}),
    "backbone.moe_backend": ("grouped", {"calibration", "quality_scores"}),
    "grading.early_exit": (False, {"quality_scores", "curated"}),
    "grading.grader": ("auto", {"calibration"}),
}
# Keys by their beginnings that change no output: how, where and when work is done, what is checked,
# and what is kept.
NO_EFFECT = (
    *("run.", "compute.", "automation.", "checks.", "retention.", "publish.", "seen."),
    *("backbone.device", "heads.cache_gib", "grading.batch_size"),
    *(
        "grading.allow_foreign_calibration",
        "prep.engine",
        "prep.reuse",
        "prep.workers",
        "prep.keep_versions",
    ),
    *("oracle.max_retries", "cache_dir", "configs", "oracle.engine.device"),
    *("oracle.engine.batch_size", "oracle.http.base_url", "oracle.http.api_key_env"),
    "oracle.http.allow_key_over_http",
    *("oracle.http.concurrency", "oracle.http.timeout_s", "oracle.http.max_attempts"),
    *("oracle.http.max_outage_s", "oracle.http.max_reply_bytes", "oracle.http.accept_model"),
    *("oracle.http.input_price", "oracle.http.output_price", "oracle.http.max_cost"),
)
# Keys that need other inputs than this run has: a trainer's forms of data, checkpoints, servers,
# files of the user's own, a state of training, or other numbers of shards.
ELSEWHERE = (
    *("active_params_b", "allow_unmanifested", "anneal_start_step", "anneal_weights", "data_path"),
    *("data_root", "dataset_path", "datasets", "eos_token_id", "flow_mode", "flow_profiles_toml"),
    *("hf_dataset_name", "max_epochs", "mix_temperature", "mixture_toml", "on_exhaust", "packing"),
    "mixture.",
    *("pack_sequences", "phases", "root", "shuffle", "shuffle_blocks", "steps", "tokenizer_path"),
    *("vocab_size", "weights", "window_stride", "attributes.", "backbone.checkpoint"),
    *("backbone.kind", "backbone.family", "calibration.target_drop", "calibration.target_of"),
    "calibration.family.column",
    *("contamination.", "curation.by", "curation.descending", "curation.include"),
    *("curation.packing", "curation.resume_from_token", "curation.stability"),
    *("heads.probe.blocks", "heads.use_salvaged"),
    *("oracle.engine.", "oracle.http.", "oracle.kind", "oracle.relabel", "oracle.rubric"),
    *("oracle.panel", "oracle.combine"),
    *(
        "oracle.extract_embedded",
        "prep.dtype",
        "prep.eos_token",
        "prep.max_tokens",
        "prep.num_shards",
    ),
    *("prep.num_valid_shards", "prep.tokens_per_shard"),
)


@pytest.fixture
def own(made: Project, tmp_path: Path) -> Project:
    return copied(made, tmp_path / "own")


def agree(run: Run) -> dict[tuple[str, str], str]:
    """What the graph foretells; what is then made is that, and afterwards all is current."""
    foretold = not_current(run)
    sure = {place for place, status in foretold.items() if status != "open"}
    written = written_by(run)
    assert sure <= written, f"not made: {sorted(sure - written)}"
    assert written <= foretold.keys(), f"not foretold: {sorted(written - foretold.keys())}"
    assert not_current(run) == {}
    return foretold


def kinds(foretold: dict[tuple[str, str], str], *statuses: str) -> set[str]:
    return {key.rpartition("/")[2] for (key, _), status in foretold.items() if status in statuses}


def test_a_run_that_was_made_is_current_and_making_it_again_writes_nothing(own: Project) -> None:
    graph = look(own.run)
    assert {state.status for state in graph.states.values()} == {"current"}
    assert len(graph.states) > 60
    assert written_by(own.run) == set()


def test_nmoe_run_starts_no_task_if_all_outputs_are_current(
    made: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "run", "--config", made.config) == {
        "tasks": [],
        "status": 0,
        "not_current": [],
    }
    assert not (made.directory / ".dagster").exists(), "Dagster did not start"


READ = "attributes.use=['signals', 'language', 'duplicates']"  # no evaluation set is read
HEAVY = "torch sklearn pandas numba matplotlib datasets dagster"


def test_a_plan_loads_no_package_that_it_can_do_without(made: Project) -> None:
    assert loaded_by_a_plan(made) == "all outputs are current\n\n"


def loaded_by_a_plan(project: Project) -> str:
    """The beginning of what a plan prints, and the heavy packages that it loaded."""
    code = f"""
import contextlib, io, sys
from nmoe_core.cli import main
with contextlib.redirect_stdout(io.StringIO()) as printed:
    main(["plan", "--config", {str(project.config)!r}, "--set", {READ!r}])
print(printed.getvalue().partition(":")[0])
print(*(set({HEAVY.split()}) & sys.modules.keys()))
"""
    return output_of(sys.executable, "-c", code)


def test_of_an_empty_project_all_is_to_be_made(tmp_path: Path) -> None:
    foretold = not_current(small_world(tmp_path).run)
    assert set(foretold.values()) <= {"missing", "open"}
    assert ("mixture/loader_plan", "") in foretold


def test_a_rule_of_columns_that_are_not_made_is_refused_once_for_all_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    class Counted(LimitedProcess):
        def __init__(self, module: str) -> None:
            started.append(module)
            super().__init__(module)

    monkeypatch.setattr("nmoe_core.attributes.where.LimitedProcess", Counted)
    found = look(small_world(tmp_path, {"curation": {"where": "n_words > 5", "num_topics": 4}}).run)
    assert len(found.of("web/selection")) + len(found.of("books/selection")) == 4
    assert len(started) == 2  # the rule over the columns that exist, and over those of the run


def test_a_plan_opens_each_file_of_a_shard_at_most_four_times(
    made: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: Counter[str] = Counter()
    really_open = os.open

    def counted(path: Any, *arguments: Any, **keys: Any) -> int:
        opened[str(path)] += 1
        return really_open(path, *arguments, **keys)

    for module in ("base.fingerprint", "tasks.graph.listings"):  # no file counts as too new
        monkeypatch.setattr(f"nmoe_core.{module}.CLOCK_NS", 0)
    monkeypatch.setattr(os, "open", counted)
    assert look(made.run).not_current() == []
    # The first shard of a source also tells the columns of all shards.
    assert {count for path, count in opened.items() if "/shard_0001/" in path} <= {1, 2, 3, 4}


QUICK = ("calibration.target_keep", "curation.where", "duplicates.jaccard", "batch_size")


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=[] if key in QUICK else pytest.mark.slow) for key in CHANGES]
)
def test_what_a_changed_setting_makes_again_is_foretold(own: Project, key: str) -> None:
    value, expected = CHANGES[key]
    run = own.run.with_settings({key: value})
    reasons = [state.reason for state in look(run).states.values()]
    assert any(key.rpartition(".")[2] in reason for reason in reasons) or not expected
    foretold = agree(run)
    assert expected <= kinds(foretold, "stale", "missing")


def test_a_rule_of_one_source_makes_only_the_outputs_of_this_source_again(own: Project) -> None:
    for rule in ("n_words > 9", "doc_hash < 0.8 or n_words > 20"):
        own.config.write_text(
            own.config.read_text().partition("[curation.where_by_source]")[0]
            + f'[curation.where_by_source]\nweb = "{rule}"\n'
        )
        states = look(own.run).states.items()
        reasons = {state.reason for (key, _), state in states if key == "web/selection"}
        assert len(reasons) == 1
        assert reasons.pop().startswith("curation.where_by_source: ")
        foretold = agree(own.run)
        assert {"web/selection", "web/curated"} <= {key for key, _ in foretold}
        assert {key for key, _ in foretold if not key.startswith("web/")} == {"mixture/loader_plan"}


def test_buckets_that_are_set_changed_and_removed_are_foretold(own: Project) -> None:
    found = {"mixture.buckets.by": ("n_words:2",), "mixture.buckets.least_tokens": 100}
    run = own.run.with_settings(found)
    assert "buckets" in kinds(agree(run), "missing")
    run = own.run.with_settings(found | {"mixture.buckets.by": ("n_words:3",)})
    assert "buckets" in kinds(agree(run), "stale")
    definition = run.tree.buckets.read_bytes()
    run = run.with_settings({"curation.where": "n_words > 9"})
    assert agree(run)["curation/buckets", ""] == "open"
    assert run.tree.buckets.read_bytes() == definition  # it is kept
    assert {"curated", "loader_plan"} <= kinds(agree(own.run), "stale")


def test_every_key_of_the_schema_is_tried_or_is_known_to_decide_no_output() -> None:
    tried = {**CHANGES, **HEADS}
    left = [key for key in run_keys() if key not in tried]
    assert [key for key in left if not key.startswith((*NO_EFFECT, *ELSEWHERE))] == []
    stale = {name for name in (*NO_EFFECT, *ELSEWHERE) if not any(k.startswith(name) for k in left)}
    assert stale == set()


def test_keys_that_say_how_work_is_done_make_nothing_stale(own: Project) -> None:
    run = own.run.with_settings(
        {
            "compute.workers": 2,
            "prep.engine": "reference",
            "prep.reuse": False,
            "prep.keep_versions": 3,
            "grading.batch_size": 8,
            "heads.cache_gib": 0.1,
            "checks.min_spearman": -1.0,
            "automation.prep": "make",
            "oracle.max_retries": 1,
        }
    )
    assert not_current(run) == {}


@pytest.fixture(scope="module")
def made_by_heads(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A run whose heads grade."""
    project = small_world(tmp_path_factory.mktemp("heads"), {"grading": {"grader": "hydra"}})
    make_all(project.run)
    return project


@pytest.mark.slow
def test_a_plan_of_heads_loads_no_package_that_it_can_do_without(made_by_heads: Project) -> None:
    assert loaded_by_a_plan(made_by_heads) == "all outputs are current\n\n"


@pytest.mark.slow
@pytest.mark.parametrize("key", HEADS)
def test_what_a_changed_setting_of_heads_makes_again_is_foretold(
    made_by_heads: Project, tmp_path: Path, key: str
) -> None:
    value, expected = HEADS[key]
    run = copied(made_by_heads, tmp_path / "own").run.with_settings({key: value})
    assert expected <= kinds(agree(run), "stale", "missing")


def test_the_page_of_a_run_says_what_is_not_current_and_why(made: Project, tmp_path: Path) -> None:
    for order, told in (("auto", "Every output is current"), ("shuffle", "auto -&gt; shuffle")):
        run = made.run.with_settings({"curation.order": order})
        page, *_ = write_report(run, tmp_path / order / "index.html")
        assert told in page.read_text()


def test_the_flips_and_tokens_of_a_new_target_are_those_that_are_then_made(own: Project) -> None:
    run = own.run.with_settings({"calibration.target_keep": 0.2})
    before = _decisions(run)
    plan = plan_run(run, run_sources(run))
    assert plan.regrade is not None
    make_all(run, ("train_heads", "grade", "curate"))
    after = _decisions(run)
    flips = sum(before[name] != after[name] for name in before)
    assert flips > 0
    assert plan.regrade.may_flip == (flips, flips)
    for source, (now, then) in plan.tokens.items():
        made = json.loads(run.tree.curated_manifest(source).read_text())["total_tokens"]
        assert then == made != now
    for doc_id, then, now in plan.flips:
        assert (before[doc_id], after[doc_id]) == (then, now)


def _decisions(run: Run) -> dict[str, str]:
    rows = read_rows(*run.tree.quality.rglob("quality_scores.jsonl"))
    return {row["doc_id"]: row["decision"] for row in rows}


@pytest.mark.parametrize(
    ("job", "settings", "named"),
    [
        ("label", {"prep.min_doc_tokens": 9}, "prep"),
        ("train_heads", {"oracle.max_doc_tokens": 24}, "label"),
        ("grade", {"calibration.target_keep": 0.3}, "train_heads"),
        pytest.param("grade", {"oracle.max_doc_tokens": 24}, "label", marks=pytest.mark.long),
        ("curate", {"calibration.target_keep": 0.3}, "train_heads"),
        pytest.param("curate", {"prep.version": "v2"}, "prep", marks=pytest.mark.long),
    ],
)
def test_a_task_whose_inputs_were_made_with_other_settings_names_the_task_to_run(
    own: Project, job: str, settings: dict[str, Any], named: str
) -> None:
    run = own.run.with_settings(settings)
    before = {path: path.stat().st_mtime_ns for path in run.tree.root.rglob("*") if path.is_file()}
    with refused("E-INPUT-SETTINGS") as error:
        make_all(run, [job])
    assert f"nmoe run {named}" in str(error.value)
    assert next(iter(settings)) in str(error.value)
    after = {path: path.stat().st_mtime_ns for path in before}
    assert after == before
    make_all(run)
    assert not_current(run) == {}


def test_a_plan_is_refused_by_its_hash_once_something_changed(own: Project) -> None:
    run = own.run.with_settings({"curation.order": "shuffle"})
    digest = plan_run(run, run_sources(run)).digest
    require_plan(run, digest[:16])
    with open(own.directory / "in" / "web.jsonl", "a") as file:
        file.write('{"id": "new", "text": "a document that is new here"}\n')
    with refused("E-PLAN-MOVED"):
        require_plan(run, digest)
    with pytest.raises(ConfigError):
        require_plan(run, "")


def test_a_curated_shard_waits_for_the_inputs_of_those_before_it(own: Project) -> None:
    record_of(own.run, "books/quality_scores", "0000").unlink()
    assert agree(own.run)["books/curated", "0001"] == "open"


Edit = Callable[[Project, dict[str, Any], random.Random], None]


def _set(project: Project, settings: dict[str, Any], rng: random.Random) -> None:
    key = rng.choice([key for key in CHANGES if key != "tokenizer"])
    if key in settings:
        del settings[key]
    else:
        settings[key] = CHANGES[key][0]


def _edit_documents(project: Project, settings: dict[str, Any], rng: random.Random) -> None:
    path = project.directory / "in" / f"{rng.choice(['web', 'books'])}.jsonl"
    rows = read_rows(path)
    match rng.randrange(3):
        case 0:
            rows.append({"id": f"n{len(rows)}", "text": f"new text {rng.random()} of some words"})
        case 1:
            rows[rng.randrange(len(rows))]["text"] = f"other text {rng.random()} of some words"
        case _:
            del rows[rng.randrange(len(rows))]
    path.write_text(json_lines(rows))


def _lose_a_record(project: Project, settings: dict[str, Any], rng: random.Random) -> None:
    run = project.run.with_settings(settings)
    there = [place for place in look(run).states if record_of(run, *place).is_file()]
    kept = [place for place in there if not place[0].endswith(("shards", "slices", "backbone"))]
    if kept:
        record_of(run, *rng.choice(kept)).unlink()


def _run_a_part(project: Project, settings: dict[str, Any], rng: random.Random) -> None:
    """A run that was killed between two tasks."""
    run = project.run.with_settings(settings)
    make_all(run, JOBS[: rng.randrange(1, len(JOBS))])


EDITS: tuple[Edit, ...] = (_set, _set, _set, _edit_documents, _lose_a_record, _run_a_part)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.long if seed < 1 else pytest.mark.slow)
        for seed in range(100)
    ],
)
def test_after_any_sequence_of_edits_what_is_foretold_is_what_is_made(
    own: Project, seed: int
) -> None:
    """Three sequences a seed."""
    rng = random.Random(seed)
    settings: dict[str, Any] = {}
    for _ in range(3):
        for _ in range(rng.randrange(1, 4)):
            rng.choice(EDITS)(own, settings, rng)
        agree(own.run.with_settings(settings))
    shutil.rmtree(own.directory)
