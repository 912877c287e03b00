"""`nmoe mix`: the mixtures that are tried, what is concluded from their losses, and the weights."""

import json
import random
import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from loader.plan.build import build_plan
from loader.plan.file import load_plan
from nmoe_core.cli import main
from nmoe_core.prep.mixture import run_stages
from nmoe_core.tasks.ablate.mix.fit import Fit
from nmoe_core.tasks.ablate.mix.mixtures import draw_mixtures, within
from nmoe_core.tasks.ablate.mix.texts import read_domains
from nmoe_core.text.tokenizer import load_tokenizer
from tests.core.tasks.ablate.words import KITCHEN, NATURE, TRADE
from tests.project import Project, jsonl_source, said, write_project

VOCABULARY = {"nature": NATURE, "kitchen": KITCHEN, "trade": TRADE}


def _text(words: Sequence[str], rng: random.Random) -> str:
    return " ".join(rng.choice(words) for _ in range(110))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Three sources of different words, and a plan over them without curation."""
    sources = []
    for name, words in VOCABULARY.items():
        rng = random.Random(name)
        rows = [{"id": f"d{i}", "text": _text(words, rng)} for i in range(150)]
        sources.append(jsonl_source(name, rows, id_field="id"))
    made = write_project(tmp_path_factory.mktemp("mix"), sources, {"seq_len": 32})
    assert main(["prep-mixture", "--config", str(made.config)]) == 0
    run = made.run
    manifests = {name: run.tree.manifest(name) for name in VOCABULARY}
    plan = build_plan(run_stages(run), manifests, run.loader, root=run.tree.root, plan_id="p")
    run.tree.plan.parent.mkdir()
    run.tree.plan.write_text(plan.placed_in(run.tree.plan.parent).to_json())
    return made


def test_mixtures_begin_with_the_plans_and_equal_shares_and_stay_below_the_most() -> None:
    plan = np.array([0.7, 0.2, 0.1])
    most = np.array([0.8, 0.5, 0.3])
    mixtures = draw_mixtures(plan, most, 12, seed=1)
    assert np.allclose(mixtures.sum(1), 1)
    assert np.allclose(mixtures[0], plan)
    assert np.allclose(mixtures[1], [0.35, 0.35, 0.3])
    assert (mixtures <= most + 1e-9).all()
    assert len(np.unique(mixtures.round(6), axis=0)) == 12
    assert np.array_equal(draw_mixtures(plan, most, 20, seed=1)[:12], mixtures)


@pytest.mark.parametrize("seed", range(20))
def test_shares_within_a_limit_have_the_sum_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 9))
    most = np.minimum(rng.dirichlet(np.ones(count)) * rng.uniform(1, count), 1)
    most /= min(1.0, most.sum())
    shares = rng.dirichlet(np.ones(count) / 4)
    found = within(shares, most)
    assert found.sum() == pytest.approx(1)
    assert (found <= most + 1e-9).all()
    if (shares <= most).all():
        assert np.allclose(found, shares)


def _planted(seed: int, helps: float) -> tuple[Fit, np.ndarray]:
    """Losses of 12 runs over four sources, of which the first lowers the loss by `helps`."""
    rng = np.random.default_rng(seed)
    plan = rng.dirichlet(np.full(4, 4.0))
    mixtures = draw_mixtures(plan, np.full(4, 0.95), 12, seed)
    losses = 2 * np.exp(-helps * np.log(mixtures[:, :1] + 0.02) + rng.normal(0, 0.004, (12, 1)))
    return Fit(mixtures, losses, np.ones(1), seed), plan


def test_a_source_that_helps_is_found_in_19_of_20_corpora_and_the_others_are_not() -> None:
    found = false = better = 0
    for seed in range(20):
        fit, plan = _planted(seed, helps=0.05)
        effects = fit.effects(plan)[:, 0]
        found += bool(effects[0, 2] < 0)
        false += bool((effects[1:, 2] < 0).any())
        better += bool(fit.propose(np.full(4, 0.95)).shares[0] > plan[0])
    assert found >= 19
    assert better >= 19
    assert false <= 1


def test_interactions_that_few_runs_show_by_chance_do_not_hide_the_source_that_helps() -> None:
    """Losses of decoders with text of three sources, of which the second has the target's words."""
    plan = np.array([0.5373, 0.1922, 0.2705])
    losses = [4.7086, 4.4266, 6.1528, 4.002, 4.8099, 4.215]
    losses += [5.2725, 4.8905, 4.3955, 4.0438, 4.5487, 4.1931]
    fit = Fit(draw_mixtures(plan, np.ones(3), 12, 100), np.array([losses]).T, np.ones(1), 100)
    effects = fit.effects(plan)[:, 0]
    assert fit.errors["interactions"] < fit.errors["shares"] < fit.errors["constant"]
    assert fit.family == "shares"
    assert (effects[:, 2] < 0).tolist() == [False, True, False]


def test_chance_alone_is_seldom_told_as_an_effect() -> None:
    told = 0
    for seed in range(20):
        fit, plan = _planted(seed, helps=0.0)
        effects = fit.effects(plan)[:, 0]
        told += bool(fit.has_effect and ((effects[:, 2] < 0) | (effects[:, 1] > 0)).any())
    assert told <= 1


def test_an_effect_of_ten_points_is_that_of_the_losses() -> None:
    fit, plan = _planted(3, helps=0.05)
    truth = ((plan[0] + 0.12) / (plan[0] + 0.02)) ** -0.05 - 1
    change, low, high = fit.effects(plan)[0, 0]
    assert low < high
    assert change == pytest.approx(truth, abs=0.005)


def test_held_out_documents_and_their_copies_are_in_no_pool(project: Project) -> None:
    plan = load_plan(project.run.tree.plan)
    domains = read_domains(plan, load_tokenizer(project.run.tokenizer), 2000, 20, seed=1)
    pool = {text[:200] for domain in domains for text in domain.pool}
    assert [domain.name for domain in domains] == [source.name for source in plan.sources]
    for domain in domains:
        assert len(domain.held_out) == 20
        assert not pool & {text[:200] for text in domain.held_out}
        words = {word for text in domain.pool for word in text.decode().split()[:-1]}
        assert words == set(VOCABULARY[domain.name])


def test_a_draw_has_the_tokens_that_were_asked_for_and_repeats_a_small_pool(
    project: Project,
) -> None:
    plan = load_plan(project.run.tree.plan)
    tokenizer = load_tokenizer(project.run.tokenizer)
    domain = read_domains(plan, tokenizer, 2000, 20, seed=1)[0]
    own = int(domain.lengths.sum())
    texts, passes = domain.draw(own + own // 2, np.random.default_rng(1))
    tokens = sum(len(tokenizer.encode_long(text.decode(), 10_000)) for text in texts)
    assert tokens == pytest.approx(1.5 * own, rel=0.01)
    assert passes == 1
    assert len(texts) > len(set(texts))


def test_weights_of_a_file_replace_those_of_the_mixture(project: Project, tmp_path: Path) -> None:
    weights = tmp_path / "weights.toml"
    weights.write_text("[weights]\nnature = 0.5\nkitchen = 0.25\ntrade = 0.25\n")
    run = project.run.with_settings({"mixture.weights": str(weights)})
    (stage,) = run_stages(run)
    assert {s.name: s.weight for s in stage.sources} == tomllib.loads(weights.read_text())[
        "weights"
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[weights]\nnature = 1\nkitchen = 1\n", "no weight of trade"),
        ("[weights]\nnature = 1\nkitchen = 1\ntrade = 1\nother = 1\n", "other"),
        ("[weights]\nnature = 0\nkitchen = 0\ntrade = 0\n", "all weights are zero"),
        ("[weights]\nnature = -1\nkitchen = 1\ntrade = 1\n", "nature"),
        ("weight = 1\n", "weight"),
    ],
)
def test_weights_of_other_sources_are_refused(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, says: str
) -> None:
    weights = tmp_path / "weights.toml"
    weights.write_text(content)
    arguments = ["plan", "--config", str(project.config), "--set", f"mixture.weights={weights}"]
    assert main(arguments) == 1
    assert says in capsys.readouterr().err


def test_too_little_text_is_refused_before_a_decoder_is_trained(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mix", "--config", str(project.config), "--tokens", "400"]) == 1
    assert "E-MIX-TEXT" in capsys.readouterr().err
    assert not (project.run.tree.root / "mix.json").exists()


@pytest.mark.long
def test_the_words_of_the_target_get_more_weight_and_a_second_command_trains_nothing(
    project: Project, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rng = random.Random("target")
    target = tmp_path / "trusted.jsonl"
    lines = [json.dumps({"text": _text(KITCHEN, rng)}) for _ in range(20)]
    target.write_text("\n".join(lines) + "\n")
    weights = tmp_path / "weights.toml"
    flags = ("--runs", 6, "--tokens", 44_000, "--seeds", 3, "--documents", 10)
    flags = (*flags, "--target", f"trusted={target}", "--write", weights)
    found = said(capsys, "mix", "--config", project.config, *flags)
    assert found["deciding"] == {"trusted": 1.0}
    assert found["sources"]["kitchen"]["proposed"] > 0.5 > found["sources"]["kitchen"]["plan"]
    assert found["tested"][0]["against"] == "plan"
    assert found["tested"][0]["ci95"][0] > 0
    written = tomllib.loads(weights.read_text())["weights"]
    assert written == {name: one["proposed"] for name, one in found["sources"].items()}
    run = project.run.with_settings({"mixture.weights": str(weights)})
    assert {s.name: s.weight for s in run_stages(run)[0].sources} == written

    def train(*_: object) -> None:
        raise AssertionError("a decoder was trained again")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nmoe_core.tasks.ablate.model.train", train)
        assert said(capsys, "mix", "--config", project.config, *flags) == found
