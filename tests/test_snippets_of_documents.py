"""Snippets of the source documents run as docs/from_the_documents.md says, and make its files."""

import contextlib
import gzip
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.cli import main
from nmoe_core.text.vocabulary import CACHE_VARIABLE, ensure_vocabulary
from tests.documents import RUN, SNIPPETS, code_in, rows_of
from tests.project import json_lines

HYDRA = "labels/oracle_120b_v1_olmo3_dev"
MODEL = ("--checkpoint", "tiny", "--data-root", "data/olmo3_dev")
SCRIPTS = {
    "curate_dataset.py": ["curate"],
    "animate_ordering.py": ["curate", "animate", "--frames", "4"],
    "compare_clusterings.py": ["curate", "compare"],
    "extract_deep_embeddings.py": ["curate", "embed"],
}


@pytest.fixture(scope="module")
def snippets(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Snippets"]:
    """The snippets, in a directory that they share."""
    directory = tmp_path_factory.mktemp("documents")
    with contextlib.chdir(directory), pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(ensure_vocabulary()))
        write_corpora()
        yield Snippets(directory, patch)


def run(*words: str) -> None:
    """Run a command of `nmoe`, which must end well."""
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        status = main(words)
    assert status == 0, f"{words}: {errors.getvalue()}"


def write_corpora() -> None:
    """Small corpora under the names of large ones, and a tiny checkpoint."""
    short = "word{} and more of it. "
    long = "Because note {} matters, it is defined; for example, 1 + 1 = 2, therefore it holds. "
    texts = [(long if i % 3 else short).format(i % 97) * (2 + i % 2) for i in range(4000)]
    rows = [{"id": str(i), "text": f"Note {i}: {text}"} for i, text in enumerate(texts)]
    owt = "openwebtext-sharded/openwebtext_{}.{}-of-{}.jsonl.gz"
    files = {"HuggingFaceFW/fineweb-edu/sample-10BT/train.jsonl": rows}
    files |= {"bigcode/the-stack-v2/python/train.jsonl": rows[:200]}
    files |= {"dlwh/wikitext_103_detokenized/train.jsonl": rows[:100], "web.jsonl": rows[:240]}
    files |= {"valid.jsonl": rows[240:400], "training_data.jsonl": rows[:150]}
    files |= {owt.format("train", i, 128): rows[i : i + 1] for i in range(1, 129)}
    files |= {owt.format("val", i, 8): rows[i : i + 1] for i in range(1, 9)}
    for name, some in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        data = json_lines(some).encode()
        Path(name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    run("make-tiny-checkpoint", "tiny")
    for name, split, where in (
        ("web", "train", "olmo3_dev/web"),
        ("valid", "valid", "olmo3_dev/web"),
        ("web", "train", "web_tokens"),
        ("web", "train", "books_tokens"),
    ):
        out = ("--output", f"data/{where}/{split}", "--name", "web", "--num-shards", "1")
        run("prep", "--source", "jsonl", "--paths", f"{name}.jsonl", *out)


class Snippets:
    """Runs the snippets in order, each on what the ones before it have made."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.patch = patch
        self.namespace: dict[str, Any] = {}
        self.waiting = list(RUN)
        self.before: dict[str, Callable[[], None]] = {
            "build loaders": self.trainer,
            "batch inference": self.tokenizer,
            "merge labels": self.labels,
            "grade a corpus": self.thresholds,
            "compare clusterings": self.embeddings,
        }

    def run_until(self, last: str) -> None:
        """Run a snippet, after those before it that have not been run."""
        while last in self.waiting:
            title = self.waiting.pop(0)
            language, text = SNIPPETS[title]
            self.before.get(title, lambda: None)()
            getattr(self, language)(title, self.placed(text))

    def placed(self, text: str) -> str:
        """The text with directories of the test, on a machine without GPUs."""
        for checkpoint in ("/data/checkpoints/gpt-oss-20b", "/data/models/gpt-oss-20b/original"):
            text = re.sub(rf"{checkpoint}(/original)?", "tiny", text)
        text = text.replace("/path/to/base-model", "tiny").replace("'cuda'", "'cpu'")
        text = text.replace("fineweb_edu/manifest.json", "fineweb_edu/train/manifest.json")
        text = text.replace("num_workers=8", "num_workers=1").replace("=256, temp", "=8, temp")
        text = text.replace("*_umap2d", "*_pca2d").replace(", ...}", "}").replace(", ...]", "]")
        return re.sub(r"(?<![\w/])/(data|checkpoints)/", r"\1/", text)

    def python(self, title: str, text: str) -> None:
        exec(compile(text, title, "exec"), self.namespace)

    def bash(self, _: str, text: str) -> None:
        for command in text.replace("\\\n", " ").splitlines():
            words = [
                one
                for word in shlex.split(command, comments=True)
                for one in (sorted(map(str, Path().glob(word))) if word[0] == "*" else [word])
            ]
            if words[:2] == ["python", "-m"]:
                self.patch.setattr(sys, "argv", words[2:])
                self.patch.delitem(sys.modules, words[2], raising=False)
                errors = io.StringIO()
                with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as ended:
                    runpy.run_module(words[2], run_name="__main__")
                assert ended.value.code == 0, f"{command}: {errors.getvalue()}"
            elif words[:1] == ["python"]:
                run(*SCRIPTS[words[1]], *words[2:])
            elif words:
                subprocess.run(["bash", "-euc", command], check=True)

    def toml(self, title: str, text: str) -> None:
        if "mixtures" in text:
            Path("mixture.toml").write_text(text)
            flow = '[flow.dev]\nmode = "dev"\nstages = ["pretrain"]\ntokens_b = 0.001\n'
            Path("flows.toml").write_text(f'{flow}[flow.dev.mixture]\npretrain = "pretrain_mix"\n')
            files = "mixture_toml = 'mixture.toml'\nflow_profiles_toml = 'flows.toml'\n"
            Path("dev.toml").write_text(
                f"{files}flow_mode = 'dev'\ndata_root = 'data'\nroot = '.'\n"
            )
            run("prep-mixture", "--config", "dev.toml", "--dry-run")
            return
        if "datasets" not in text:  # the annealing, over the sources of the snippet before it
            sources = self.placed(SNIPPETS["datasets and phases"][1]).split("[[data.phases]]")[0]
            text = sources.replace("\n[[data", f"\n{text[7:]}\n[[data", 1)
        settings = "seq_len = 64\nbatch_size = 8\nsteps = 200_000\n"
        settings += "cache_dir = 'cache'\non_exhaust = 'wrap'\n"
        Path("run.toml").write_text(
            settings + text.replace("meta-llama/Llama-3-8B", "o200k_harmony")
        )
        self.open(Path("run.toml"), ["web", "code", "books"])

    def yaml(self, _: str, text: str) -> None:
        text = re.sub(r"gs://[\w-]+/", "", text).replace("gpt2", "o200k_base")
        Path("run.yaml").write_text(f"seq_len: 64\nbatch_size: 8\nsteps: 4\n{text}")
        self.open(Path("run.yaml"), ["owt", "wikitext"])

    def open(self, path: Path, names: list[str]) -> None:
        from nmoe.data import build_loader

        loader, _ = build_loader(path, rank=0, world_size=1)
        assert list(loader.source_names) == names
        loader.next()

    def json(self, _: str, text: str) -> None:
        from nmoe.data import build_loader

        cfg = self.namespace["cfg"] | {"policy": "least_consumed"}
        loader, _ = build_loader(cfg, rank=0, world_size=1)
        loader.load_state_dict(json.loads(text.replace('"..."', '"web"')))
        own = loader.state_dict()["datasets"]
        assert {"spec", "row_offset", "token_offset"} <= own[0].keys()
        assert own[0]["token_offset"] == 512, "after 456 tokens, at the next whole window"

    def trainer(self) -> None:
        """What a trainer brings."""
        cfg = {"data_path": "data/olmo3_dev/web", "seq_len": 64, "batch_size": 8, "steps": 4}
        self.namespace |= {"cfg": cfg, "model": None, "max_steps": 2, "eval_every": 1}
        self.namespace |= {"train_step": lambda *_: 0.0, "evaluate": lambda _, valid: valid.next()}

    def tokenizer(self) -> None:
        """The tokenizer and the texts of the batch."""
        self.namespace |= {"tokenizer": self.namespace["enc"], "texts": ["One text", "Two texts"]}

    def labels(self) -> None:
        """Slices, and labels of the text statistics."""
        slices = "data/labels/slices_olmo3_dev"
        run("hydra", "slices", "--data-root", "data/olmo3_dev", "--out", slices)
        for split, count in (("train", 1), ("val", 8)):
            for i in range(count):
                rows = ("--input-docids", f"{slices}/{split}_shard_0{i}", "--quiet")
                out = ("--out", f"data/{HYDRA}/{split}/shard_{i}", "--oracle", "heuristic")
                run("hydra", "oracle-label", *rows, *out, *MODEL[2:])

    def thresholds(self) -> None:
        """Calibration on the scores of the heads."""
        labels = ("--labels", f"data/{HYDRA}/merged/labels_val.jsonl")
        places = (
            "--out",
            "data/calibration/hydra_20b_v1",
            "--heads-dir",
            "checkpoints/hydra_20b_v1",
        )
        run("hydra", "calibrate", *labels, *places, *MODEL)

    def embeddings(self) -> None:
        """Two spaces to compare."""
        own = Path("training_data_curated_embeddings.npy").read_bytes()
        for name in ("shallow", "deep"):
            Path(f"{name}_embeddings.npy").write_bytes(own)


@pytest.mark.parametrize("title", RUN)
def test_a_snippet_of_the_documents_runs(snippets: Snippets, title: str) -> None:
    snippets.run_until(title)


def test_thresholds_on_labels_alone_are_refused_with_the_flags_that_are_missing(
    snippets: Snippets, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(SNIPPETS["calibrate"][1].replace("\\\n", " "))
    assert main(["hydra", *words[3:]]) == 1
    assert re.search("E-CONFIG.+--heads-dir with --data-root", capsys.readouterr().err)


def test_every_file_of_the_page_is_made(snippets: Snippets) -> None:
    snippets.run_until(RUN[-1])
    missing = []
    for document, here in rows_of("Files"):
        pattern = code_in(document if here == "same" else here)
        pattern = re.sub(r"\{\w+\}", "*", pattern).replace("N", "[0-9]")
        if not list(snippets.directory.glob(f"**/{pattern}")):
            missing.append(pattern)
    assert missing == []


def test_paths_of_a_plan_are_there_or_are_refused(snippets: Snippets) -> None:
    from loader import FormatError
    from nmoe.data import populate_paths, resolve_plan

    cfg = {"data_path": "data/web_tokens/train", "seq_len": 16, "batch_size": 2, "steps": 2}
    plan = resolve_plan(cfg)
    assert populate_paths(plan) is plan
    with pytest.raises(FormatError, match="manifest"):
        populate_paths(
            plan.placed_in(snippets.directory / "elsewhere").moved_to(
                snippets.directory / "elsewhere"
            )
        )
