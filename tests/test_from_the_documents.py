"""docs/from_the_documents.md is true: its names import, its commands parse, its files are made, and
the snippets of the source documents run."""

import argparse
import contextlib
import gzip
import importlib
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.cli import build_parser, main
from nmoe_core.text.vocabulary import CACHE_VARIABLE, ensure_vocabulary
from tests.project import REPOSITORY, json_lines, output_of

PAGE = (REPOSITORY / "docs" / "from_the_documents.md").read_text("utf-8")
SNIPPETS = {
    title: (language, text)
    for title, language, text in re.findall(
        r"^## ([^\n]+)\n\n```(\w+)\n(.+?)^```$",
        (REPOSITORY / "tests" / "snippets_of_documents.txt").read_text("utf-8"),
        re.MULTILINE | re.DOTALL,
    )
}
HYDRA = "labels/oracle_120b_v1_olmo3_dev"
MODEL = ("--checkpoint", "tiny", "--data-root", "data/olmo3_dev")
SCRIPTS = {
    "curate_dataset.py": ["curate"],
    "animate_ordering.py": ["curate", "animate", "--frames", "4"],
    "compare_clusterings.py": ["curate", "compare"],
    "extract_deep_embeddings.py": ["curate", "embed"],
}


def rows_of(section: str) -> list[list[str]]:
    """The cells of every table of a section, without the heads."""
    text = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    (body,) = (part for part in text if part.startswith(f"{section}\n"))
    lines = [line.removesuffix("|") for line in body.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.split("|")[1:]] for line in lines]
    return [row for row in rows if row[0] not in ("document", "command", "snippet")]


RUN = [row[0] for row in rows_of("Snippets") if row[1] == "yes"]


def code_in(cell: str) -> str:
    """The code of a cell."""
    found = re.match(r"`([^`]+)`", cell)
    assert found, cell
    return found[1]


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of a command such as `nmoe hydra grade`."""
    parser = build_parser()
    for word in command.split()[1:]:
        (parts,) = (
            action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
        )
        parser = parts.choices[word]
    return parser


def named(dotted: str) -> Any:
    """What a dotted name leads to: a module, or a name of one."""
    parts = dotted.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            found = vars(found)[part] if isinstance(found, type) else getattr(found, part)
        return found
    raise AssertionError(f"no module of {dotted}")


@pytest.mark.parametrize(("document", "here"), [row[:2] for row in rows_of("Commands")])
def test_every_command_of_the_page_is_a_verb_and_a_module_of_nmoe_data(
    document: str, here: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = parser_of(code_in(here)).format_usage()
    words = code_in(document).split()
    if words[:2] == ["python", "-m"]:
        monkeypatch.setattr(sys, "argv", [words[2], *words[3:], "--help"])
        monkeypatch.delitem(sys.modules, words[2], raising=False)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(words[2], run_name="__main__")
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(usage)


@pytest.mark.parametrize(("command", "flags"), [row for row in rows_of("Flags") if len(row) == 2])
def test_every_flag_of_the_page_is_one_of_its_command(command: str, flags: str) -> None:
    known = parser_of(code_in(command))._option_string_actions
    assert [flag for flag in code_in(flags).split() if flag not in known] == []


@pytest.mark.parametrize("here", [row[1] for row in rows_of("Flags") if len(row) == 3])
def test_a_flag_that_works_otherwise_has_the_flag_that_the_page_names(here: str) -> None:
    command, _, flag = code_in(here).partition(" --")
    assert f"--{flag}" in parser_of(command)._option_string_actions


def test_the_page_has_every_flag_that_a_snippet_of_the_documents_gives_a_command() -> None:
    told = set(re.findall(r"(?<!\S)`?(--?[a-z][\w-]*)", PAGE))
    of_the_shell = {"-exec", "-name", "-p"}
    shown = {
        flag
        for language, text in SNIPPETS.values()
        if language == "bash"
        for flag in re.findall(r"(?<!\S)(--?[a-z][\w-]*)", text)
    }
    assert shown - of_the_shell - told == set()


def test_every_script_of_the_page_is_there_or_is_not() -> None:
    for document, here, _ in rows_of("Scripts"):
        name = code_in(document)
        path = name if here == "same" else here.strip("`")
        assert (REPOSITORY / path).is_file() == (here != "none")
        assert not list(REPOSITORY.glob(f"*/{name}")) or here != "none"


def test_every_variable_of_the_scripts_is_read_by_them() -> None:
    text = (REPOSITORY / "scripts" / "hydra_env.sh").read_text()
    (sentence,) = re.findall(r"Their variables are (.+?);", PAGE, re.DOTALL)
    names = re.findall(r"`(\w+)`", sentence)
    assert len(names) == 9
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_every_module_of_the_page_imports() -> None:
    for document, here in rows_of("Modules"):
        if here != "none":
            assert importlib.import_module(code_in(document))
            assert importlib.import_module(code_in(here))
    files = (REPOSITORY / "nmoe" / "data").glob("[a-z]*.py")
    modules = {code_in(row[0]) for row in rows_of("Modules")} - {"triton_kernels"}
    assert modules == {f"nmoe.data.{path.stem}" for path in files}


@pytest.mark.parametrize(("document", "here"), [row[:2] for row in rows_of("Names")])
def test_every_name_of_the_page_leads_to_what_it_says(document: str, here: str) -> None:
    import nmoe.data

    name = code_in(document)
    if name.startswith("nmoe.data."):
        assert named(name) is named(code_in(here))
        return
    assert name not in nmoe.data.__all__
    if here != "none":
        assert named(code_in(here)) is not None


def test_the_page_has_every_name_of_the_package() -> None:
    import nmoe.data

    rows = {code_in(row[0]) for row in rows_of("Names")}
    assert {f"nmoe.data.{name}" for name in nmoe.data.__all__} <= rows
    with pytest.raises(AttributeError, match="has no attribute 'MixtureSampler'"):
        _ = nmoe.data.MixtureSampler


def test_a_package_of_the_users_own_keeps_its_modules(tmp_path: Path) -> None:
    own = tmp_path / "nmoe"
    own.mkdir()
    (own / "__init__.py").write_text("MINE = True\n")
    (own / "trainer.py").write_text("def train() -> None: ...\n")
    code = "import sys; sys.path{}; import nmoe; print(hasattr(nmoe, 'MINE'), nmoe.__path__[0])\n"
    code += "import nmoe.trainer; print(nmoe.trainer.train.__name__)"
    ahead = output_of(sys.executable, "-c", code.format(f".insert(0, '{tmp_path}')"))
    assert ahead == f"True {own}\ntrain\n"
    behind = output_of(sys.executable, "-c", code.format(f".append('{tmp_path}')"))
    assert behind == f"False {REPOSITORY / 'nmoe'}\ntrain\n"


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


def test_every_snippet_is_in_the_page_and_what_is_said_to_run_is_there() -> None:
    told = {title: does_run for title, does_run, _ in rows_of("Snippets")}
    assert set(SNIPPETS) <= set(told)
    assert set(RUN) <= set(SNIPPETS)


def test_thresholds_on_labels_alone_are_refused_with_the_flags_that_are_missing(
    snippets: Snippets, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(SNIPPETS["calibrate"][1].replace("\\\n", " "))
    assert main(["hydra", *words[3:]]) == 1
    assert re.search("E-CONFIG.+--heads-dir with --data-root", capsys.readouterr().err)


@pytest.mark.parametrize("title", ["smoke test and research run", "oracle labels on eight GPUs"])
def test_a_command_that_cannot_run_here_is_parsed_as_it_is_printed(title: str) -> None:
    text = SNIPPETS[title][1].replace("\\\n", " ")
    for command in filter(None, re.split(r"python -m nmoe\.data\.", text)):
        words = shlex.split(re.sub(r"\$\(.+?\)", "0", command))
        verb = [] if words[0] == "cli" else [words[0]]
        build_parser().parse_args([*verb, *words[1:]])


def test_every_file_of_the_page_is_made(snippets: Snippets) -> None:
    snippets.run_until(RUN[-1])
    missing = []
    for document, here in rows_of("Files"):
        pattern = code_in(document if here == "same" else here)
        pattern = re.sub(r"\{\w+\}", "*", pattern).replace("N", "[0-9]")
        if not list(snippets.directory.glob(f"**/{pattern}")):
            missing.append(pattern)
    assert missing == []


def test_every_key_of_the_page_is_in_a_snippet_that_is_read() -> None:
    texts = [text for language, text in SNIPPETS.values() if language in ("toml", "yaml", "json")]
    keys = re.findall(r"`(\w+)`", " ".join(row[0].partition(":")[2] for row in rows_of("Keys")))
    assert len(keys) == 31
    absent = [key for key in keys if not any(re.search(rf'\b{key}"? *[=:]', t) for t in texts)]
    assert absent == []


def test_documents_that_are_dealt_to_shards_make_a_split_that_verifies(tmp_path: Path) -> None:
    import numpy as np

    from nmoe.data import ShardedWriter, get_shard_id
    from nmoe_core.shards.manifest import ShardFormat

    fmt = ShardFormat("own", "v1", "o200k_harmony", 201088, 199999, "0" * 64)
    writer = ShardedWriter(tmp_path / "train", fmt, num_shards=4)
    for i in range(40):
        writer.add_document(np.arange(i + 1, dtype=np.uint32), str(i), "0" * 64)
    manifest = writer.finalize()
    assert (manifest.total_documents, manifest.total_tokens) == (40, sum(range(2, 42)))
    path = (
        tmp_path / "train" / f"shard_{get_shard_id('7', 4):04d}" / "own-v1-shard-000000.ids.jsonl"
    )
    assert '"7"' in path.read_text()
    run("verify", str(tmp_path / "train"), "--deep")


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


def test_the_toml_snippets_are_toml() -> None:
    assert all(tomllib.loads(t) for language, t in SNIPPETS.values() if language == "toml")
