import base64
import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest

from loader import resolve_plan
from loader.__main__ import decode, main, read_vocabulary
from tests.loader.shared import open_loader
from tests.project import output_of
from tests.refusals import refused

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "dagster", "nmoe_core"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import loader

opened = loader.open_loader(sys.argv[1], world_size=2, rank=1)
plan = opened.plan
inputs, targets = opened.next()
assert type(inputs).__module__ == "numpy", type(inputs)
print(inputs.sum() + targets.sum(), inputs.shape)
try:
    loader.open_loader(plan, backend="torch")
except loader.ConfigError as error:
    print(error.line())
"""


def test_import_and_a_batch_work_where_torch_is_missing(plan_file, two_stages):
    printed = output_of(sys.executable, "-W", "error", "-c", BLOCKED, plan_file)
    inputs, targets = open_loader(two_stages.cfg, 1, 2).next()
    first, second = printed.splitlines()
    assert first == f"{inputs.sum() + targets.sum()} (6, 16)"
    assert second.startswith("ERROR [E-CONFIG]: backend: torch is not installed")


def test_fingerprint_is_the_digest_of_the_first_batches_in_global_order(
    plan_file, two_stages, capsys
):
    digest = hashlib.sha256()
    ranks = [open_loader(two_stages.cfg, r, 5) for r in range(5)]
    for _ in range(10):
        batches = [rank.next() for rank in ranks]
        for part in (0, 1):
            rows = np.concatenate([batch[part] for batch in batches])
            digest.update(rows.astype("<i8").tobytes())
    assert main(["fingerprint", str(plan_file)]) == 0
    assert capsys.readouterr().out == f"{digest.hexdigest()}  first 10 steps\n"
    assert main(["fingerprint", str(plan_file), "--steps", "99"]) == 0
    assert "first 33 steps" in capsys.readouterr().out


def test_peek_shows_quotas_and_epochs_by_stage(plan_file, capsys):
    assert main(["peek", str(plan_file), "--steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line.split() for line in lines if line.startswith(("pretrain", "mid"))]
    plan = resolve_plan(plan_file)
    named = [[stage.name, source.name] for stage in plan.stages for source in stage.sources]
    assert [row[:2] for row in table] == named
    assert len(named) == 6
    quotas = [s.quota_sequences for stage in plan.stages for s in stage.sources]
    assert [int(row[3]) for row in table] == quotas
    assert float(table[0][5]) == pytest.approx(quotas[0] * 16 / 9000, abs=6e-4)
    assert float(table[4][5]) == pytest.approx((quotas[0] + quotas[4]) * 16 / 9000, abs=6e-4)
    assert sum(int(row[6]) for row in table[:3]) == 24
    assert plan.plan_hash in lines[0]


def test_verify_reads_every_shard_and_index(tree, tmp_path, capsys):
    tree.add("web", 2000)
    tree.add("web", 300, split="valid")
    path = tree.root / "web" / "plan.json"
    path.write_text(resolve_plan(tree.one()).to_json())
    assert main(["verify", str(path)]) == 0
    assert capsys.readouterr().out.count("ok ") == 3
    first, second = sorted((tree.root / "web" / "train").rglob("*.idx"))[:2]
    own = first.read_bytes()
    first.write_bytes(second.read_bytes())
    assert main(["verify", str(path)]) == 1
    assert "E-INDEX-FORMAT" in capsys.readouterr().err
    first.write_bytes(own)
    shard = sorted((tree.root / "web" / "train").rglob("*.npy"))[1]
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    assert main(["verify", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ERROR [E-SHARD-CHECKSUM]: ")
    assert error.count("\n") == 1
    assert shard.name in error


def test_command_exits_1_with_one_line_on_a_refusal(plan_file, tmp_path):
    value = json.loads(plan_file.read_text()) | {"seed": 1}
    (tmp_path / "plan.json").write_text(json.dumps(value))
    command = [sys.executable, "-m", "loader", "peek", tmp_path / "plan.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("ERROR [E-PLAN-HASH]: ")
    assert done.stderr.count("\n") == 1


def test_peek_shows_rows_of_a_batch_with_their_sources_and_documents_as_text_or_ids(
    plan_file, two_stages, tmp_path, capsys
):
    loader = open_loader(two_stages.cfg)
    loader.seek_step(3)
    batch = loader.next_with_meta()
    tokens = (base64.b64encode(b"<%d>" % i) + b" %d\n" % i for i in range(999))
    (tmp_path / "v.tiktoken").write_bytes(b"".join(tokens))
    vocabulary = ["--vocab", str(tmp_path / "v.tiktoken"), "--tokens", "3"]
    for more, most in (([], 16), (vocabulary, 3)):
        assert main(["peek", str(plan_file), "--steps", "3", "--rows", "2", *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        expected = ["step 3, lr_scale 1"]
        for row in range(2):
            name = batch.source_names[batch.source_index[row]]
            expected.append(f"sequence {36 + row} of {name}")
            for a, b in batch.document_spans[row].tolist():
                shown = batch.inputs[row, a:b][:most].tolist()
                text = " ".join(map(str, shown))
                if more:
                    text = repr("".join(f"<{t}>" if t < 999 else "<|999|>" for t in shown))
                expected.append(f"  {a}-{b}: {text}{' ...' if b - a > most else ''}")
        assert lines[lines.index(expected[0]) :] == expected


def test_tokens_decode_to_utf8_and_unknown_ids_are_shown(tmp_path):
    path = tmp_path / "v.tiktoken"
    parts = [b"h\xc3", b"\xa9", b" x", b"\xff"]
    path.write_bytes(b"".join(base64.b64encode(p) + b" %d\n" % i for i, p in enumerate(parts)))
    vocabulary = read_vocabulary(path)
    assert decode([0, 1, 2, 199_999, 3], vocabulary) == "hé x<|199999|>\ufffd"
    for line in ("aGk=", "aGk= x", "a$k= 1", "aGk= 1 2"):
        path.write_text(f"aGk= 0\n{line}\n")
        with refused("E-CONFIG", match="v.tiktoken:2: not a vocabulary"):
            read_vocabulary(path)
    with refused("E-CONFIG", match="cannot read the vocabulary file"):
        read_vocabulary(tmp_path / "none")


def test_usage_error_exits_2(plan_file):
    for arguments in ([], ["peek"], ["peek", str(plan_file), "--steps", "-1"], ["nope", "x"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
