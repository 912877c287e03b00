import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from nmoe_core.cli import main
from tests.project import REPOSITORY, said
from tests.refusals import refused_line

SCRIPTS = REPOSITORY / "scripts"


def test_documents_are_sliced_labelled_watched_and_merged_without_a_run_configuration(
    prepared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slices, labels, data_root = tmp_path / "slices", tmp_path / "labels", str(prepared_data)
    slice_them = ["hydra", "slices", "--data-root", data_root, "--out", str(slices)]
    counts = said(capsys, *slice_them)
    assert sum(counts["all"][split] for split in ("train", "val", "test")) == 150
    assert not said(capsys, *slice_them)["all"]["changed"]
    for split in ("train", "val", "test"):
        for i in range(8):
            facts = said(
                capsys, "hydra", "oracle-label", "--oracle", "heuristic",
                "--input-docids", str(slices / f"{split}_shard_0{i}"),
                "--data-root", data_root, "--out", str(labels / split / f"shard_{i}"),
                "--relabel", "2" if split == "val" else "0", "--quiet",
            )  # fmt: skip
            (row,) = facts.values()
            assert row["scorer"] == "heuristic/text-statistics-v2"
    rows = said(capsys, "hydra", "status", "--labels", str(labels), "--slices", str(slices))
    assert [row["state"] for row in rows] == ["DONE"] * 24
    merged = said(capsys, "hydra", "merge-labels", "--labels", str(labels))
    assert merged["train"]["labels"] == counts["all"]["train"]
    assert merged["val"]["labels"] == counts["all"]["val"]
    noise = json.loads((labels / "merged" / "noise_val.json").read_text())
    assert noise["mae"] == 0.0
    assert main(["hydra", "status", "--labels", str(labels), "--slices", str(slices)]) == 0
    assert "24 shards: 24 DONE, 0 RUNNING, 0 PENDING" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--out"),
        (["--out", "x"], "--checkpoint"),
        (["--out", "x", "--oracle", "http"], "--base-url"),
        (["--out", "x", "--oracle", "http", "--base-url", "http://h/v1"], "--model"),
        (["--out", "x", "--oracle", "heuristic"], "--input-docids"),
        (["--out", "x", "--oracle", "heuristic", "--input-docids", "s"], "--data-root"),
        (["--out", "x", "--oracle", "heuristic", "--max-doc-tokens", "1"], "max_doc_tokens"),
    ],
)
def test_a_missing_flag_is_named_before_anything_is_written(
    flags: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert named in refused_line(capsys, "hydra", "oracle-label", *flags, code="E-CONFIG]")
    assert not list(tmp_path.iterdir())


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
    code, calls = script("hydra_oracle_8gpu.sh", environment, "--max-batch", "64")
    root = tmp_path / "labels"
    assert code == fails
    for gpu in range(8):
        # The recorder fails for val_shard_03: the test slice behind it is not asked for.
        splits = ("train", "val") if fails and gpu == 3 else ("train", "val", "test")
        assert [call for call in calls if f"gpu={gpu} " in call] == [
            f"nmoe gpu={gpu} hydra oracle-label"
            f" --input-docids {root}/slices_v1/{split}_shard_0{gpu} --data-root /corpus"
            f" --checkpoint /weights/120b --out {root}/run_v1/{split}/shard_{gpu} --max-batch 64"
            for split in splits
        ]
