"""`[curation] repeat`: one pass reads a document as often as an expression says."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader import DeterministicLoader
from loader.errors import PlanError
from loader.files.format import load_manifest
from loader.plan.file import load_plan
from loader.rows.origins import origins
from loader.rows.stream import Stream
from nmoe_core.audit.lineage import explain_document
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.curate.even_spacing import spread_repeats
from nmoe_core.curate.shards.planning import SHARD_ORDERS
from nmoe_core.prep.mixture import run_sources
from nmoe_core.shards.documents import shard_files
from nmoe_core.shards.verify import verify_manifest
from nmoe_core.tasks.checks import check_attribute_of_all, check_curated
from nmoe_core.tasks.curate import make_plan
from nmoe_core.tasks.preview import plan_run
from nmoe_core.tasks.report.summary import run_report
from nmoe_core.tasks.selection.composition import composition
from nmoe_core.tasks.selection.query import query
from nmoe_core.tasks.shards import require_selectable
from tests.project import Project, contents, jsonl_source, said, write_project
from tests.refusals import refused

pytest.importorskip("duckdb")
pytest.importorskip("numba")

SEQ_LEN = 32
REPEAT = "case when source = 'web' then least(num_copies, 4) else 1 end"
SETTINGS: dict[str, Any] = {
    "seq_len": SEQ_LEN,
    "batch_size": 6,
    "on_exhaust": "wrap",
    "grading": {"grader": "none"},
    "attributes": {"use": ["duplicates"], "columns": ["stars"]},
    "duplicates": {"count_copies": True, "priority": ["web", "books"]},
    "prep": {"min_doc_tokens": 1},
    "curation": {"num_topics": 3, "order": "golden", "where": "is_survivor", "repeat": REPEAT},
}
NUM_TEXTS = 40


def _texts() -> list[str]:
    rng = random.Random(5)
    words = [f"word{i}" for i in range(400)]
    return [" ".join(rng.sample(words, rng.randrange(8, 30))) + "." for _ in range(NUM_TEXTS)]


def _rows() -> dict[str, list[dict[str, Any]]]:
    """Text i of `web` occurs i % 6 + 1 times, some of them in `books`, which has its own too."""
    rng = random.Random(6)
    web, books = [], []
    for i, text in enumerate(_texts()):
        for k in range(i % 6 + 1):
            to = books if k and rng.random() < 0.3 else web
            to.append({"id": f"t{i}.{k}", "text": text, "stars": i})
    own = [f"{text[:-1]} of a book." for text in _texts()[:15]]
    books += [{"id": f"own{i}", "text": " ".join(reversed(t.split()))} for i, t in enumerate(own)]
    return {"web": web, "books": [{"stars": 0, **row} for row in books]}


def _command(project: Project, *argv: object) -> None:
    assert main([*map(str, argv), "--config", str(project.config)]) == 0


def _curated(project: Project) -> Run:
    """Select, curate and plan."""
    _command(project, "curate", "shards")
    make_plan(project.run, ["web", "books"], [])
    return project.run


def _configured(project: Project, **curation: Any) -> Project:
    """The same project with other keys of `[curation]`; None leaves a key out."""
    settings = {**SETTINGS, "curation": {**SETTINGS["curation"], **curation}}
    sources = [jsonl_source(name, rows) for name, rows in _rows().items()]
    return write_project(project.directory, sources, settings)


@pytest.fixture(autouse=True)
def fixed_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Project:
    sources = [jsonl_source(name, rows) for name, rows in _rows().items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        project = write_project(tmp_path_factory.mktemp("repeats"), sources, SETTINGS)
        for verb in (["prep-mixture"], ["attributes"], ["hydra", "grade"]):
            _command(project, *verb)
        _curated(project)
    return project


@pytest.fixture
def made(made_once: Project, tmp_path: Path) -> Project:
    """A curated project with its plan."""
    shutil.copytree(made_once.directory, tmp_path / "run")
    return Project(tmp_path / "run")


def _wanted(source: str, most: int = 4) -> Counter[str]:
    """How often one pass reads each text, from the rows of the input."""
    rows = _rows()
    of_web = {row["text"] for row in rows["web"]}
    every = Counter(row["text"] for one in rows.values() for row in one)
    if source == "web":
        return Counter({text: min(every[text], most) for text in of_web})
    return Counter({row["text"]: 1 for row in rows["books"] if row["text"] not in of_web})


def _texts_by_id(run: Run, source: str) -> dict[str, str]:
    return {row["id"]: row["text"] for row in _rows()[source]}


def _documents(run: Run, source: str) -> list[tuple[str, np.ndarray]]:
    """Text and tokens of every document of the curated shards, in order."""
    texts, found = _texts_by_id(run, source), []
    for shard in run.tree.shards(source, 2):
        for file in shard_files(run.tree.curated, load_manifest(shard.curated_manifest)):
            found += [(texts[ids[0]], np.array(tokens)) for _, tokens, ids in file.documents()]
    return found


def _read_by_ranks(run: Run, world_size: int, first: int, stop: int) -> Iterator[np.ndarray]:
    """The tokens of the rows of steps, in the order of sequences, from loaders of their own."""
    plan = load_plan(run.tree.plan)
    ranks = [DeterministicLoader(plan, rank, world_size) for rank in range(world_size)]
    for loader in ranks:
        loader.seek_step(first)
    for _ in range(first, stop):
        for loader in ranks:
            inputs, targets = map(np.asarray, loader.next())
            yield from np.concatenate([inputs, targets[:, -1:]], axis=1)[:, : plan.stride]


def _read_of(run: Run, source: str, rows: list[np.ndarray]) -> np.ndarray:
    """The tokens of the windows of a source, in their order."""
    windows: dict[int, np.ndarray] = {}
    with closing(Stream(load_plan(run.tree.plan), "train")) as stream:
        for n, row in enumerate(rows):
            found = origins(stream, n)
            if found.source == source:
                windows[found.window] = row
    assert sorted(windows) == list(range(len(windows)))
    return np.concatenate([windows[k] for k in range(len(windows))])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_pass_reads_each_document_as_often_as_the_rule_says(made: Project, world_size: int):
    run = made.run
    steps = load_plan(run.tree.plan).num_sequences // 6
    middle = steps // 2
    rows = [*_read_by_ranks(run, world_size, 0, middle)]
    rows += _read_by_ranks(run, 6 // world_size, middle, steps)  # resumed at another size
    for source in ("web", "books"):
        documents = _documents(run, source)
        assert Counter(text for text, _ in documents) == _wanted(source)
        stream = np.concatenate([tokens for _, tokens in documents])
        read = _read_of(run, source, rows)
        assert len(read) >= len(stream)
        np.testing.assert_array_equal(read, np.resize(stream, len(read)))  # pass after pass


@pytest.mark.parametrize("order", [name for name in SHARD_ORDERS if name != "bin_packing"])
def test_every_order_holds_each_document_as_often_and_spreads_its_readings(
    made: Project, order: str
) -> None:
    stability = {"stability": "insert_only"} if order == "insert_only" else {}
    run = _curated(_configured(made, order=order, **stability))
    for source in ("web", "books"):
        texts = [text for text, _ in _documents(run, source)]
        assert Counter(texts) == _wanted(source)
        if order not in ("window_fill", "shuffle"):  # they place readings as if by chance
            assert all(first != second for first, second in pairwise(texts))
        assert check_curated(run, source)["permutation"].passed
        assert check_curated(run, source)["alignment"].passed
        for shard in run.tree.shards(source, 2):
            manifest = load_manifest(shard.curated_manifest)
            assert verify_manifest(manifest, checksums=True, deep=True) == []
    assert [one.key for one in plan_run(run, run_sources(run)).outputs] == ["hydra/backbone"]


def test_readings_are_a_fraction_of_the_list_apart() -> None:
    rng = np.random.default_rng(0)
    times = rng.integers(1, 5, 200)
    numbers = np.repeat(np.arange(200), times)
    listed = numbers[spread_repeats(numbers)]
    assert (np.sort(listed) == numbers).all()
    for number in np.flatnonzero(times > 1).tolist():
        gaps = np.diff(np.flatnonzero(listed == number)) / len(listed)
        np.testing.assert_allclose(gaps, 1 / times[number], atol=0.05)
    alone = np.array([2, 5, 9])
    assert spread_repeats(alone).tolist() == [0, 1, 2]
    assert spread_repeats(alone[:0]).tolist() == []


def test_num_copies_counts_the_documents_of_each_group_over_all_sources(made: Project) -> None:
    rows = _rows()
    every = Counter(row["text"] for one in rows.values() for row in one)
    texts = {(s, row["id"]): row["text"] for s, own in rows.items() for row in own}
    answer = query(made.run, "select source, ingest_id, num_copies from documents").rows
    assert len(answer) == len(texts)
    for source, name, count in answer:
        assert count == every[texts[source, name]]
    assert all(
        one.passed for one in check_attribute_of_all(made.run, "duplicates", [*rows]).values()
    )


def test_another_rule_makes_only_the_shards_whose_counts_change(made: Project) -> None:
    run = made.run
    before = contents(run.tree.curated)
    scores = contents(run.tree.quality) | contents(run.tree.topics) | contents(run.tree.attributes)
    run = _curated(_configured(made, repeat=REPEAT.replace("4", "3 + 1")))  # means the same
    assert contents(run.tree.curated) == before
    one = next(i for i in range(NUM_TEXTS) if i % 6 == 1)
    run = _curated(
        _configured(made, repeat=f"case when stars::int = {one} then 1 else {REPEAT} end")
    )
    changed = {k for k, payload in contents(run.tree.curated).items() if payload != before.get(k)}
    names = {Path(name).parts[:3] for name in changed if "shard_" in name}
    assert len(names) == 1
    assert not any(name.startswith("books") for name in changed)
    now = contents(run.tree.quality) | contents(run.tree.topics) | contents(run.tree.attributes)
    assert {k for k in now if now[k] != scores.get(k)} <= {k for k in now if "selection" in k}


def test_a_rule_that_repeats_no_document_changes_no_curated_shard(made: Project) -> None:
    run = _curated(_configured(made, repeat=None))
    before = contents(run.tree.curated)
    run = _curated(_configured(made, repeat="1"))
    assert contents(run.tree.curated) == before
    for source in ("web", "books"):
        assert Counter(t for t, _ in _documents(run, source)) == _wanted(source, most=1)


def test_a_rule_without_a_condition_repeats_what_the_decisions_keep(made: Project) -> None:
    run = _curated(_configured(made, where=None, repeat="2"))
    for source, rows in _rows().items():
        read = Counter(text for text, _ in _documents(run, source))
        assert read == Counter(row["text"] for row in rows * 2)


@pytest.mark.parametrize(
    ("rule", "code", "words"),
    [
        ("least(stars::int, 4)", "E-SELECT-REPEAT", ["0 or null for web//", "from 1 to 100"]),
        ("null::int", "E-SELECT-REPEAT", ["0 or null for web//"]),
        ("nullif(num_copies, 3)", "E-SELECT-REPEAT", ["0 or null for web//"]),
        ("num_copies - 2", "E-SELECT-REPEAT", ["-1 for web//", "least(greatest(coalesce("]),
        ("num_copies + 99", "E-SELECT-REPEAT", ["for web//", "from 1 to 100"]),
        ("18446744073709551615::ubigint", "E-SELECT-REPEAT", ["for web//"]),
        ("sqrt(num_copies)", "E-SELECT-EXPRESSION", ["not an integer", "cast("]),
        ("num_copies > 2", "E-SELECT-EXPRESSION", ["not an integer", "BOOLEAN"]),
        ("num_copies and 2", "E-SELECT-EXPRESSION", ["curation.repeat"]),
        ("'3'", "E-SELECT-EXPRESSION", ["not an integer", "VARCHAR"]),
        ("num_copy", "E-SELECT-EXPRESSION", ["no such column", "num_copies"]),
        ("random()", "E-SELECT-EXPRESSION", ["function"]),
    ],
)
def test_a_rule_that_is_no_count_is_refused_in_one_line_before_anything_is_written(
    made: Project, capsys: pytest.CaptureFixture[str], rule: str, code: str, words: list[str]
) -> None:
    project = _configured(made, repeat=rule)
    before = contents(project.run.tree.curated)
    capsys.readouterr()
    assert main(["curate", "shards", "--config", str(project.config)]) == 1
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "ERROR" in one]
    assert line.startswith(f"ERROR [{code}]: ")
    assert all(word in line for word in ["run.toml: curation.repeat", *words])
    assert contents(project.run.tree.curated) == before
    if code == "E-SELECT-EXPRESSION":  # known before a task starts
        with refused(code, naming=words):
            require_selectable(project.run)


def test_copies_that_are_not_counted_are_named_with_the_remedy(made: Project) -> None:
    settings = {**SETTINGS, "duplicates": {}}
    sources = [jsonl_source(name, rows) for name, rows in _rows().items()]
    run = write_project(made.directory, sources, settings).run
    with refused("E-SELECT-EXPRESSION", naming=["num_copies", "set count_copies = true"]):
        require_selectable(run)
    run = write_project(made.directory, sources, settings | {"attributes": {"use": []}}).run
    with refused("E-SELECT-EXPRESSION", naming=["add duplicates to [attributes] use"]):
        require_selectable(run.with_settings({"curation.where": "doc_hash < 1"}))


def test_an_order_that_puts_readings_side_by_side_is_refused(made: Project) -> None:
    project = _configured(made, order="bin_packing")
    with refused("E-CONFIG", naming=["bin_packing puts repeated readings side by side"]):
        _ = project.run


@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_document_that_is_written_too_often_or_too_rarely_fails_the_check(
    made: Project, times: int
) -> None:
    run = made.run
    kept = shutil.copytree(run.tree.attributes, made.directory / "kept")
    chosen = next(i for i in range(NUM_TEXTS) if i % 6 == 2)  # is read three times
    _curated(
        _configured(made, repeat=f"case when stars::int = {chosen} then {times} else {REPEAT} end")
    )
    shutil.rmtree(run.tree.attributes)
    shutil.copytree(kept, run.tree.attributes)  # the selection of three readings
    found = check_curated(run, "web")["permutation"]
    assert not found.passed
    said_why = "kept documents missing" if times < 3 else "not kept, or written too often"
    assert said_why in found.found


def test_a_takedown_removes_all_readings(made: Project, capsys: pytest.CaptureFixture[str]) -> None:
    run = made.run
    often = next(i for i in range(NUM_TEXTS) if i % 6 == 5)
    text = _texts()[often]
    assert [one for one, _ in _documents(run, "web")].count(text) == 4
    made.directory.joinpath("gone.txt").write_text(f"re:{text[:40]}\n")
    flags = "--config", made.config
    listed = str(made.directory / "gone.txt")
    found = said(capsys, "takedown", listed, *flags)
    (row,) = [one for one in found["items"] if one["item"].startswith("re:")]
    assert row["curated"] == 4
    assert len([one for one in found["documents"] if one["tree"] == "curated"]) == 4
    said(capsys, "takedown", listed, *flags, "--apply", "--by", "x", "--why", "y")
    run = _curated(made)
    read = Counter(one for one, _ in _documents(run, "web"))
    assert read == Counter({k: n for k, n in _wanted("web").items() if k != text})
    assert check_curated(run, "web")["permutation"].passed
    assert said(capsys, "takedown", listed, *flags, "--verify")["holds"]


def test_figures_are_given_before_and_after_repeats(
    made: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made.run
    plan = load_plan(run.tree.plan)
    report = run_report(run)
    moved = {one.name: one for one in composition(run, ["web", "books"])["source"]}
    for row in report["sources"]:
        documents = _documents(run, row["source"])
        once = {text: len(tokens) for text, tokens in documents}
        tokens = sum(len(tokens) for _, tokens in documents)
        assert (row["curated"], row["curated_tokens"]) == (len(documents), tokens)
        assert row["repeats"] == len(documents) - len(once)
        assert row["repeat_tokens"] == tokens - sum(once.values())
        assert moved[row["source"]].after == tokens
        taken = plan.taken()[row["source"]]
        assert row["epochs"] == pytest.approx(taken * plan.stride / tokens, abs=0.05)
        lines = report["account"]["sources"][row["source"]]
        assert not any(line["name"] == "not accounted for" for line in lines)
        assert {"repeated by curation.repeat"} <= {line["name"] for line in lines}
    (web,) = [row for row in report["sources"] if row["source"] == "web"]
    _command(made, "report", "--html", made.directory / "page" / "index.html")
    card = (made.directory / "page" / "README.md").read_text()
    kept = f"{web['curated'] - web['repeats']:,} | {web['curated_tokens'] - web['repeat_tokens']:,}"
    assert f"| {kept} | {web['curated_tokens']:,} |" in card
    assert "tokens with repeats" in (made.directory / "page" / "index.html").read_text()
    (row, _) = said(capsys, "select", "--config", made.config)
    assert row["read_tokens"] == web["curated_tokens"]
    assert row["kept_tokens"] == web["curated_tokens"] - web["repeat_tokens"]
    project = _configured(made, repeat=REPEAT.replace("4", "2"))
    capsys.readouterr()
    _command(project, "plan", "--sample", "0")
    twice = _wanted("web", most=2)
    lengths = {text: len(tokens) for text, tokens in _documents(run, "web")}
    after = sum(lengths[text] * count for text, count in twice.items())
    shown = capsys.readouterr().out
    assert "curated tokens now" in shown
    assert "before repeats" in shown
    figures = plan_run(project.run, run_sources(project.run))
    assert figures.tokens["web"] == (web["curated_tokens"], after)
    assert figures.kept["web"] == sum(lengths.values())


def test_a_document_says_how_often_it_is_read_and_where(
    made: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made.run
    shard = run.tree.shard("web", 0)
    rows = [json.loads(line) for line in shard.lineage.read_text().splitlines()]
    name, count = Counter(row["parent_doc_id"] for row in rows).most_common(1)[0]
    assert count == 4
    facts = explain_document(run, name, 100)
    places = [facts["curated"], *facts["curated"]["again"]]
    numbers = [i for i, row in enumerate(rows) if row["parent_doc_id"] == name]
    assert [place["number"] for place in places] == numbers
    assert sum(one["tokens"] for one in facts["readings"]) >= 4 * facts["tokens"]
    capsys.readouterr()
    _command(made, "explain", name)
    shown = capsys.readouterr().out
    assert f"kept, read 4 times: {REPEAT}" in shown
    assert shown.count("number ") == 4


def test_consumed_readings_stay_and_the_others_follow(made: Project) -> None:
    before = [text for text, _ in _documents(made.run, "web")]
    lengths = np.cumsum([len(tokens) for _, tokens in _documents(made.run, "web")])
    tokens = {"web": int(lengths[30]), "books": 1}
    changed = {"stability": "resume", "resume_from_token": tokens}
    run = _curated(_configured(made, **changed, repeat=REPEAT.replace("4", "2")))
    after = [text for text, _ in _documents(run, "web")]
    assert after[:31] == before[:31]
    wanted = _wanted("web", most=2)
    assert Counter(after) == Counter(before[:31]) | wanted
    assert check_curated(run, "web")["permutation"].passed
    again = _curated(_configured(made, **changed))
    assert Counter(text for text, _ in _documents(again, "web")) == _wanted("web")


def test_a_limit_of_passes_counts_repeated_tokens(made: Project) -> None:
    text = (made.directory / "mixture.toml").read_text()
    limited = text.replace('id = "web"', 'id = "web"\nmax_epochs = 1')
    (made.directory / "mixture.toml").write_text(limited)
    run = made.run
    tokens = load_manifest(run.tree.curated_manifest("web")).total_tokens
    with pytest.raises(PlanError) as caught:
        make_plan(run, ["web", "books"], [])
    assert caught.value.code == "E-PLAN-SHORT"
    assert f"{tokens:,}" in str(caught.value) or str(tokens) in str(caught.value)


def test_a_new_copy_is_counted_where_its_group_is_and_nowhere_else(made: Project) -> None:
    path = made.directory / "in" / "books.jsonl"
    one = next(i for i in range(NUM_TEXTS) if i % 6 == 0)  # has no copy yet
    row = {"id": "copy", "text": _texts()[one], "stars": 0}
    path.write_text(path.read_text() + json.dumps(row) + "\n")
    asked = "select ingest_id, num_copies from documents"
    before = dict(query(made.run, asked).rows)
    files = contents(made.run.tree.attributes, "duplicates.parquet")
    for verb in (["prep-mixture"], ["attributes"]):
        _command(made, *verb)
    after = dict(query(made.run, asked).rows)
    assert {name: n for name, n in after.items() if n != before.get(name)} == {
        f"t{one}.0": 2,
        "copy": 2,
    }
    now = contents(made.run.tree.attributes, "duplicates.parquet")
    assert 1 <= sum(now[name] != files[name] for name in now) <= 2
