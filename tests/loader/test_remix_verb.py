"""`nmoe remix`: a plan, a state and new shares in; the next plan and its certificate out."""

import json

import pytest

from loader import open_loader, resolve_plan, verify_certificate
from nmoe_core.cli import main
from tests.project import said
from tests.refusals import refused_line


@pytest.fixture
def live(two_stages, tmp_path):
    """A plan and the state of its loader after step 5, as files."""
    plan, state = tmp_path / "plan.json", tmp_path / "state.json"
    plan.write_text(resolve_plan(two_stages.cfg).placed_in(tmp_path).to_json())
    loader = open_loader(plan, backend="numpy")
    loader.seek_step(5)
    state.write_text(json.dumps(loader.state_dict()))
    return plan, state


def test_a_live_run_continues_under_other_shares(live, tmp_path, capsys):
    plan, state = map(str, live)
    output = tmp_path / "next" / "plan.json"
    output.parent.mkdir()
    edit = ["--weights", "web=1,math=0.5", "--remove", "code", "--phase", "25:math=1:0.1"]
    facts = said(capsys, "remix", plan, "--state", state, *edit, "-o", output)
    assert (facts["step"], facts["steps"], facts["changed"]) == (5, 33, True)
    assert facts["before"] == {"web": 63.158, "code": 26.316, "math": 10.526}
    assert [part["percent"] for part in facts["after"]] == [
        {"web": 66.667, "math": 33.333},
        {"web": 50.0, "math": 50.0},
    ]
    assert [part["lr_scale"] for part in facts["after"]] == [1.0, 0.1]
    assert facts["stages_ended"] == ["mid"]
    loader = open_loader(output, rank=1, world_size=2, backend="numpy")
    after = loader.plan
    loader.load_state_dict(json.loads(live[1].read_text()))
    assert loader.step == 5
    certificate = verify_certificate(str(output.with_suffix(".certificate.json")))
    assert certificate.after.plan_hash == after.plan_hash == facts["plan_hash_after"]
    assert (
        main(
            [
                "remix",
                str(output),
                "--step",
                "9",
                "--weights",
                "web=1",
                "--remove",
                "math",
                "-o",
                str(output),
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == [
        "source",
        "before",
        "%",
        "remix@9",
        "%",
        "windows",
        "read",
        "to",
        "read",
    ]


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["--weights", "web=1,math=1"], "source 'code': a source has no weight"),
        (
            ["--weights", "web=1,math=1,code=2", "--remove", "code"],
            "source 'code': a removed source has a weight",
        ),
        (["--weights", "web=1,math=1,code=1", "--remove", "cod"], "did you mean 'code'?"),
    ],
)
def test_no_source_is_left_out_by_accident(live, tmp_path, capsys, flags, found):
    argv = ["remix", str(live[0]), "--step", "5", *flags, "-o", str(tmp_path / "next.json")]
    assert found in refused_line(capsys, *argv, code="E-CONFIG")
    assert not list(tmp_path.glob("next*"))


@pytest.mark.parametrize(
    "flags",
    [
        ["--weights", "web"],
        ["--weights", "web=1,web=2"],
        ["--weights", "web=one"],
        ["--weights", "web=1", "--add", "cat"],
        ["--weights", "web=1", "--phase", "web=1"],
        ["--weights", "web=1", "--state", "state.json"],
    ],
)
def test_flags_that_cannot_be_read_are_wrong_usage(live, flags, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["remix", str(live[0]), "--step", "5", *flags, "-o", "next.json"])
    assert caught.value.code == 2
