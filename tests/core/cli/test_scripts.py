"""The runbook's scripts: which commands they call, with what the environment says."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.project import REPOSITORY, output_of

SCRIPTS = REPOSITORY / "scripts"


@pytest.fixture
def recorder(tmp_path: Path) -> dict[str, str]:
    """An environment in which `nmoe` and `kubectl` write down how they were called."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("nmoe", "kubectl", "nvidia-smi"):
        path = tools / name
        path.write_text(
            "#!/bin/sh\n"
            f'echo "{name} gpu=$CUDA_VISIBLE_DEVICES $*" >>"$CALLS"\n'
            'case "$*" in *val_shard_03*) exit "${FAIL:-0}";; esac\n'
        )
        path.chmod(path.stat().st_mode | stat.S_IEXEC)
    hidden = ("POD", "LOCAL", "CUDA_VISIBLE_DEVICES")
    kept = {key: value for key, value in os.environ.items() if key not in hidden}
    return kept | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "LABELS_ROOT": str(tmp_path / "labels"),
        "LOG_DIR": str(tmp_path),
        "DATA_ROOT": "/corpus",
        "SLICES_ID": "slices_v1",
        "ORACLE_RUN_ID": "run_v1",
        "CKPT_120B": "/weights/120b",
    }


def script(name: str, environment: dict[str, str], *arguments: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        ["bash", str(SCRIPTS / name), *arguments], env=environment, check=False, capture_output=True
    )
    return done.returncode, Path(environment["CALLS"]).read_text().splitlines()


def test_scripts_hand_the_environment_to_the_commands(
    recorder: dict[str, str], tmp_path: Path
) -> None:
    root = tmp_path / "labels"
    code, calls = script("hydra_slices.sh", recorder)
    asked = f"nmoe gpu= hydra slices --data-root /corpus --out {root}/slices_v1"
    assert (code, calls) == (0, [asked])
    code, calls = script("hydra_status.sh", recorder | {"POD": "pod-1"})
    assert code == 0
    places = f"--labels {root}/run_v1 --slices {root}/slices_v1"
    assert calls[1] == f"kubectl gpu= exec pod-1 -- env nmoe hydra status {places}"
    code, calls = script("hydra_status.sh", recorder | {"POD": "pod-1", "LOCAL": "1"})
    assert calls[3] == f"nmoe gpu= hydra status {places}"


@pytest.mark.parametrize("fails", [0, 1])
def test_the_launcher_labels_each_shard_on_its_own_gpu_and_finishes_the_others_when_one_fails(
    recorder: dict[str, str], tmp_path: Path, fails: int
) -> None:
    environment = recorder | {"FAIL": str(fails)}
    code, calls = script("hydra_oracle_8gpu.sh", environment, "--batch-size", "64")
    root = tmp_path / "labels"
    assert code == fails
    for gpu in range(8):
        # The recorder fails for val_shard_03: the test slice behind it is not asked for.
        splits = ("train", "val") if fails and gpu == 3 else ("train", "val", "test")
        assert [call for call in calls if f"gpu={gpu} " in call] == [
            f"nmoe gpu={gpu} hydra oracle-label"
            f" --input-docids {root}/slices_v1/{split}_shard_0{gpu} --data-root /corpus"
            f" --checkpoint /weights/120b --out {root}/run_v1/{split}/shard_{gpu} --batch-size 64"
            for split in splits
        ]


MERGED = "{root}/run_v1/merged/labels"
TRAIN = f"--labels {MERGED}_train.jsonl --labels-val {MERGED}_val.jsonl --checkpoint /weights/20b"
PARTS = "--checkpoint /weights/20b --heads-dir H --calibration C"


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "hydra_merge_calibrate.sh": [
            "hydra merge-labels --labels {root}/run_v1",
            f"hydra calibrate --labels {MERGED}_val.jsonl --out C --compat -x",
        ],
        "hydra_train_heads.sh": [
            f"train {head} {TRAIN} --data-root /corpus --out O -x" for head in ("judge", "probe")
        ],
        "hydra_grade.sh": [
            "hydra grade --input-docids {root}/slices_v1/docids_test.jsonl --data-root /corpus "
            f"{PARTS} --out O -x"
        ],
    }.items(),
)
def test_scripts_of_heads_call_the_verbs_and_fail_with_them(
    recorder: dict[str, str], tmp_path: Path, name: str, expected: list[str]
) -> None:
    environment = recorder | {"LOCAL": "1", "POD": "p", "CKPT_20B": "/weights/20b"}
    environment |= {"CAL_DIR": "C", "OUT_DIR": "O", "HEADS_DIR": "H"}
    code, calls = script(name, environment, "-x")
    root = tmp_path / "labels"
    assert code == 0
    found = sorted(call.split(maxsplit=2)[2] for call in calls)
    assert found == sorted(call.format(root=root) for call in expected)
    (tmp_path / "tools" / "nmoe").write_text("#!/bin/sh\nexit 3\n")
    assert script(name, environment)[0] != 0


def test_the_merge_script_calibrates_on_the_heads_once_they_are_there(
    recorder: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "hydra_judge.safetensors").touch()
    code, calls = script("hydra_merge_calibrate.sh", recorder | {"HEADS_DIR": str(tmp_path)})
    assert code == 0
    assert "--compat" not in calls[-1]
    assert f"--heads-dir {tmp_path} --checkpoint" in calls[-1]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_scripts_are_clean() -> None:
    scripts = [SCRIPTS / f"hydra_{n}.sh" for n in ("merge_calibrate", "train_heads", "grade")]
    output_of("shellcheck", "-x", "-P", SCRIPTS.parent, *scripts)
