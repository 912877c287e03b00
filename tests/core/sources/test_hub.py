"""Datasets: the rows of the split asked for, the commit recorded, and one kind of error."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nmoe_core.prep.journal import Journal
from nmoe_core.prep.progress import PrepProgress
from nmoe_core.prep.run import PrepReport, PrepSettings, prep_shards, write_manifest
from nmoe_core.sources.hub import DatasetsSource
from nmoe_core.sources.records import Position, Split
from nmoe_core.sources.spec import SourceSpec
from tests.core.prep.conftest import tree_digest
from tests.core.sources.read import builder_of, good, opened, records, spans, texts
from tests.project import serving
from tests.refusals import refused

datasets = pytest.importorskip("datasets")


def _source(
    base: Path, split: str = "train", dataset: str = "./hub", **keys: Any
) -> DatasetsSource:
    return DatasetsSource(SourceSpec(id="hub", hf_dataset=dataset, **keys), base, split)


class Hub:
    """A repository of the hub at its commit: what is downloaded lies in a cache, and is noted."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.repository, self.cache, self.commit = base / "repository", base / "cache", "c1"
        self.downloaded: list[str] = []
        self.scheme = "hf"
        self.repository.mkdir()
        load = datasets.load_dataset_builder

        def load_dataset_builder(dataset: str, revision: str | None = None, **options: Any) -> Any:
            if dataset != "org/name":
                return load(dataset, revision=revision, **options)
            builder = load(str(self.repository), **options)
            found = {
                split: [
                    f"{self.scheme}://datasets/{dataset}@{revision}/{Path(file).relative_to(self.repository)}"
                    for file in files
                ]
                for split, files in builder.config.data_files.items()
            }
            return SimpleNamespace(
                config=SimpleNamespace(data_files=found, name=builder.config.name),
                as_streaming_dataset=builder.as_streaming_dataset,
            )

        monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
        monkeypatch.setattr("huggingface_hub.hf_hub_download", self.download)
        monkeypatch.setattr(
            "huggingface_hub.HfApi.dataset_info", lambda *_, **__: SimpleNamespace(sha=self.commit)
        )

    def download(self, dataset: str, name: str, *, repo_type: str, revision: str) -> str:
        assert (dataset, repo_type, revision) == ("org/name", "dataset", self.commit)
        from huggingface_hub.errors import EntryNotFoundError

        path, original = self.cache / revision / name, self.repository / name
        if not original.exists():
            raise EntryNotFoundError("no such file")
        if not path.exists():
            self.downloaded.append(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(original.read_bytes())
        return str(path)


def _save(base: Path, columns: dict[str, Any], split: Any = None) -> None:
    datasets.Dataset.from_dict(columns, split=split).save_to_disk(str(base / "hub"))


@pytest.mark.parametrize("form", ["save_to_disk", "parquet"])
def test_a_local_dataset_directory_is_cut_into_disjoint_splits(tmp_path: Path, form: str) -> None:
    rows = [{"text": f"text number {i}", "key": f"k{i}"} for i in range(100)]
    whole = datasets.Dataset.from_list(rows)
    directory = tmp_path / "hub"
    if form == "parquet":
        directory.mkdir()
        whole.to_parquet(directory / "train.parquet")
    else:
        datasets.DatasetDict({"train": whole}).save_to_disk(str(directory))
    keys = {"hf_dataset": "./hub", "hf_valid_split": "train[10%:25%]", "id_field": "key"}
    train, valid = (
        {record.id for record in good(source) if record.row in rows}
        for source, rows in (opened(tmp_path, split, **keys) for split in ("train", "valid"))
    )
    assert valid == {f"k{i}" for i in range(10, 25)}
    assert train == {f"k{i}" for i in range(100)} - valid
    assert opened(tmp_path, hf_dataset="./hub").source.field_names() == ["text", "key"]
    for nowhere in ("./nowhere", "a/b/c"):
        with refused("E-SOURCE-NOTFOUND", "no such directory"):
            _source(tmp_path, dataset=nowhere)
    for change, code in (
        ({"hf_split": "test"}, "E-SOURCE-NOTFOUND"),
        ({"text_field": "body"}, "E-SOURCE-FIELD"),
    ):
        with refused(code):
            opened(tmp_path, **{"hf_dataset": "./hub"} | change).source.check()


@pytest.mark.parametrize(("saved_as", "asked"), [("valid", "train"), (None, "valid")])
def test_a_dataset_saved_alone_has_only_its_own_split(
    tmp_path: Path, saved_as: str | None, asked: str
) -> None:
    split = datasets.NamedSplit(saved_as) if saved_as else None
    _save(tmp_path, {"text": ["a"]}, split)
    own = _source(tmp_path, split=saved_as or "train")
    own.check()
    assert texts(own) == ["a"]
    with refused("E-SOURCE-NOTFOUND"):
        _source(tmp_path, split=asked).check()


def test_a_dataset_without_rows_has_no_fields_and_one_saved_so_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    datasets.Dataset.from_dict({"text": []}).to_parquet(tmp_path / "hub" / "train.parquet")
    assert _source(tmp_path).field_names() == []
    _save(tmp_path / "saved", {"text": []})  # the library writes what it cannot read
    with refused("E-SOURCE-EMPTY"):
        _source(tmp_path / "saved").check()


@pytest.mark.parametrize(
    ("split", "says", "num_rows"), [("train", 7, 7), ("train", 0, 2), ("valid", 7, 2), (None, 0, 2)]
)
def test_rows_are_counted_where_the_dataset_does_not_say_how_many_its_split_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str | None, says: int, num_rows: int
) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a", "b"]}).to_iterable_dataset()
    if split is not None:
        rows.info.splits = datasets.splits.SplitDict()
        rows.info.splits.add(datasets.SplitInfo(split, num_examples=says))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: builder_of(rows))
    source = _source(tmp_path, dataset="org/name", hf_revision="c" * 40)
    assert source.num_rows() == num_rows


def test_null_texts_are_empty_and_a_column_of_floats_is_no_id(tmp_path: Path) -> None:
    _save(tmp_path, {"text": ["a", None], "score": [0.5, 1.5]})
    assert texts(_source(tmp_path)) == ["a", ""]
    with refused("E-SOURCE-FIELD", "field is double, not text or whole numbers"):
        records(_source(tmp_path, id_field="score"))


@pytest.mark.parametrize("form", ["save_to_disk", "parquet", "jsonl"])
def test_reading_resumes_at_the_end_of_any_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr("nmoe_core.sources.hub._BATCH_ROWS", 16)
    monkeypatch.setattr("nmoe_core.sources.forms.columns.BLOCK_BYTES", 200)
    whole = datasets.Dataset.from_dict({"text": [f"text {i} " + "x" * i for i in range(60)]})
    if form == "save_to_disk":
        whole.save_to_disk(str(tmp_path / "hub"))
    else:
        (tmp_path / "hub").mkdir()
        write = whole.to_parquet if form == "parquet" else whole.to_json
        write(str(tmp_path / "hub" / f"train.{form}"))
    source = _source(tmp_path)
    blocks = spans(source)
    assert len(blocks) > 8
    assert blocks[-1][1].row == source.num_rows() == 60
    for i in (*range(0, len(blocks), 3), len(blocks) - 1):
        assert spans(_source(tmp_path), blocks[i][1]) == blocks[i + 1 :]


def test_a_file_of_other_columns_is_one_error_that_names_the_row(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "a.jsonl").write_text('{"text": "a"}\n' * 600)
    (tmp_path / "hub" / "b.jsonl").write_text('{"text": {"b": 1}, "x": 1}\n')
    with refused("E-SOURCE-TORN", r"\./hub.*row 512"):
        records(_source(tmp_path, hf_data_files=("a.jsonl", "b.jsonl")))


def test_the_revision_of_a_directory_does_not_depend_on_the_split(tmp_path: Path) -> None:
    _save(tmp_path, {"text": ["a"]})
    revisions = {_source(tmp_path, split=split).revision() for split in ("train", "valid")}
    assert len(revisions) == 1
    source = _source(tmp_path)
    assert ({source.revision()}, source.changed) == (revisions, ())
    (tmp_path / "hub" / "new.txt").touch()
    assert source.revision() not in revisions
    assert source.changed == ["new.txt"]
    assert _source(tmp_path, hf_subset="small").revision() not in revisions


def test_what_is_read_from_the_hub_is_the_commit_that_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    commits = iter(("c1", "c2"))

    def dataset_info(_: object, dataset: str, revision: str | None) -> SimpleNamespace:
        asked.append((dataset, revision))
        return SimpleNamespace(sha=next(commits))

    def load_dataset_builder(dataset: str, **options: Any) -> Any:
        asked.append((dataset, options["revision"]))
        return builder_of(datasets.Dataset.from_dict({"text": ["a"]}))

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    source = _source(tmp_path, dataset="org/name", hf_revision="main")
    before = source.revision()
    assert len(records(source)) == 1
    assert source.revision() == before
    assert asked == [("org/name", "main"), ("org/name", "c1")]
    assert source.provenance() == {"hf_dataset": "org/name", "hf_revision": "c1"}
    moved = _source(tmp_path, dataset="org/name", hf_revision="main")
    assert moved.revision() != before


@pytest.mark.parametrize("library", [True, False])
def test_a_hub_that_does_not_answer_is_a_network_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: bool
) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    failure = HfHubHTTPError.__bases__[0]("no answer") if library else ConnectionError("no answer")

    def dataset_info(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    source = _source(tmp_path, dataset="org/name")
    for read in (source.revision, source.check):
        with refused("E-SOURCE-NETWORK", "org/name"):
            read()


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_files_of_the_hub_are_downloaded_as_they_are_reached_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr("nmoe_core.sources.hub._BATCH_ROWS", 16)
    hub = Hub(tmp_path, monkeypatch)
    names = [f"data/train-{k}.{form}" for k in range(3)]
    for k, name in enumerate(names):
        rows = datasets.Dataset.from_dict({"text": [f"{k} {i}" for i in range(20 + k)]})
        (hub.repository / "data").mkdir(exist_ok=True)
        (rows.to_parquet if form == "parquet" else rows.to_json)(str(hub.repository / name))
    _source(tmp_path, dataset="org/name").check()
    assert hub.downloaded == []
    blocks = spans(_source(tmp_path, dataset="org/name"))
    assert hub.downloaded == names
    expected = [f"{k} {i}" for k in range(3) for i in range(20 + k)]
    found = records(_source(tmp_path, dataset="org/name"))
    assert [record.text for record in found] == expected
    chosen = _source(tmp_path, dataset="org/name", hf_data_files=names[1])
    assert texts(chosen) == expected[20:41]
    for i, (_, end, _) in enumerate(blocks):
        assert spans(_source(tmp_path, dataset="org/name"), end) == blocks[i + 1 :]
    assert hub.downloaded == names
    later = records(_source(tmp_path, dataset="org/name"), Position(offset=25, row=25))
    assert [record.text for record in later] == expected[25:]
    assert hub.downloaded == names
    hub.commit = "c2"
    source = _source(tmp_path, dataset="org/name")
    next(source.blocks())
    assert hub.downloaded[3:] == names[:1]


def test_prep_of_a_hub_data_set_goes_on_and_grows_without_a_second_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.sources.hub._BATCH_ROWS", 16)
    monkeypatch.setattr(Journal, "commit_if_due", Journal.commit)
    hub = Hub(tmp_path, monkeypatch)
    names = [f"train-{k}.parquet" for k in range(3)]
    for k, name in enumerate(names):
        rows = {"text": [f"file {k}, row {i}, " + "and more words " * 20 for i in range(60)]}
        datasets.Dataset.from_dict(rows).to_parquet(str(hub.repository / name))
    budget = 8_000  # of 11,820 tokens

    def prep(out: str, max_tokens: int | None, stop_at: int = 999) -> PrepReport:
        def progress(state: PrepProgress) -> None:
            if state.documents >= stop_at:
                raise KeyboardInterrupt

        settings = PrepSettings(name="web", num_shards=2, max_tokens=max_tokens)
        split = Split(_source(tmp_path, dataset="org/name"))
        report = prep_shards(split, settings, tmp_path / out, progress=progress)
        write_manifest(settings, tmp_path / out)
        return report

    with pytest.raises(KeyboardInterrupt):
        prep("grown", budget, stop_at=40)
    assert hub.downloaded == names[:1]
    first = prep("grown", budget)
    assert first.documents_tokenized < first.num_documents < 180
    grown = prep("grown", None)
    assert grown.num_documents == 180
    assert grown.documents_reused == first.num_documents
    assert hub.downloaded == names
    prep("fresh", None)
    assert hub.downloaded == names
    assert tree_digest(tmp_path / "grown") == tree_digest(tmp_path / "fresh")


def test_kept_files_are_read_as_the_card_of_the_dataset_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path, monkeypatch)
    (hub.repository / "README.md").write_text(
        "---\nconfigs:\n- config_name: small\n  sep: ';'\n  data_files: s.csv\n"
        "- config_name: other\n  data_files: o.csv\n---\n"
    )
    (hub.repository / "s.csv").write_text("text;key\na, b;1\nc;2\n")
    (hub.repository / "o.csv").write_text("text\nother\n")
    assert texts(_source(tmp_path, dataset="org/name", hf_subset="small")) == ["a, b", "c"]
    assert hub.downloaded == ["README.md", "s.csv"]


def test_a_source_that_streams_keeps_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path, monkeypatch)
    (hub.repository / "a.jsonl").write_text('{"text": "a"}\n')
    source = _source(tmp_path, dataset="org/name", hf_streaming=True)
    assert texts(source) == ["a"]
    assert hub.downloaded == []


def test_a_file_that_the_hub_does_not_send_is_a_network_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    hub = Hub(tmp_path, monkeypatch)
    (hub.repository / "a.jsonl").write_text('{"text": "a"}\n')

    def download(*_: object, **__: object) -> None:
        raise LocalEntryNotFoundError("no answer")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with refused("E-SOURCE-NETWORK", "org/name"):
        records(_source(tmp_path, dataset="org/name"))


def test_a_kept_file_is_read_with_the_types_of_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path, monkeypatch)
    (hub.repository / "a.jsonl").write_text('{"text": "a", "key": "x"}\n')
    (hub.repository / "b.jsonl").write_text('{"text": "b"}\n')
    (hub.repository / "c.jsonl").write_text('{"text": null, "key": null}\n')
    assert texts(_source(tmp_path, dataset="org/name", id_field="key")) == ["a", "b", ""]


def test_files_that_are_not_of_the_commit_are_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path, monkeypatch)
    hub.scheme = "zip"
    (hub.repository / "a.jsonl").write_text('{"text": "a"}\n')
    assert texts(_source(tmp_path, dataset="org/name")) == ["a"]
    assert hub.downloaded == []


_CARD = "configs:\n- config_name: default\n  {}\n- config_name: other\n  data_files: data/a.txt\n"


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """A dataset directory of a stranger, beside a secret."""
    for name in ("hub/data/a.txt", "secret.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    return tmp_path / "hub"


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "named",
    [
        "data_files: ../secret.txt",
        "data_files: [{{split: train, path: ['data/a.txt', 'data/../../*.txt']}}]",
        "data_files: {{train: '{base}/secret.txt'}}",
        "data_files: 'file://{base}/secret.txt'",
        "data_files: 'file:{base}/secret.txt'",
        "data_files: 'zip://a.txt::{base}/a.zip'",
        "data_dir: ..",
    ],
)
def test_a_dataset_directory_that_names_files_outside_of_it_is_refused(
    tmp_path: Path, stranger: Path, file: str, named: str
) -> None:
    card = _CARD.format(named.format(base=tmp_path))
    (stranger / file).write_text(f"---\n{card}---\n" if file == "README.md" else card)
    for subset in (None, "other"):
        with refused("E-SOURCE-OUTSIDE", naming=["./hub", "hf_data_files"]):
            records(_source(tmp_path, hf_subset=subset))
    (stranger / file).unlink()
    assert texts(_source(tmp_path)) == ["text of hub/data/a.txt"]


@pytest.mark.parametrize(
    "card", ["configs: [x]", "configs: 3", "- configs", "configs: {a: b}", "configs: [", "[" * 3000]
)
def test_a_card_that_cannot_be_read_is_one_error(tmp_path: Path, stranger: Path, card: str) -> None:
    for name, text in (("README.md", f"---\n{card}\n---\n"), (".huggingface.yaml", card)):
        (stranger / name).write_text(text)
        with refused("E-SOURCE-NOTFOUND", "cannot open it"):
            records(_source(tmp_path))
        (stranger / name).unlink()


def test_a_card_whose_lists_hold_one_another_many_times_is_read_at_once(
    tmp_path: Path, stranger: Path
) -> None:
    lists = "".join(f", &b{i} [*b{i - 1}, *b{i - 1}]" for i in range(1, 60))
    (stranger / ".huggingface.yaml").write_text(f"configs: [{{data_files: [&b0 [..]{lists}]}}]")
    with refused("E-SOURCE-OUTSIDE"):
        records(_source(tmp_path))


def test_a_dataset_directory_sends_no_request_to_an_address_that_it_names(
    tmp_path: Path, stranger: Path
) -> None:
    asked = []
    with serving(lambda *_: asked.append(1)) as (address, _):
        card = _CARD.format(f"data_files: 'http://{address}/x.jsonl'")
        (stranger / "README.md").write_text(f"---\n{card}---\n")
        with refused("E-SOURCE-OUTSIDE", naming=["/x.jsonl"]):
            records(_source(tmp_path))
    assert asked == []


def test_a_link_out_of_a_dataset_directory_is_refused_unless_it_is_asked_for(
    tmp_path: Path, stranger: Path
) -> None:
    (stranger / "data" / "b.txt").symlink_to("a.txt")
    assert len(texts(_source(tmp_path))) == 2
    (stranger / "data" / "c.txt").symlink_to(tmp_path / "secret.txt")
    for files in (None, "data/*.txt"):
        with refused("E-SOURCE-LINK", naming=["c.txt", "secret.txt", "follow_links = true"]):
            records(_source(tmp_path, hf_data_files=files))
        chosen = _source(tmp_path, hf_data_files=files, follow_links=True)
        assert texts(chosen)[-1] == "text of secret.txt"
    (tmp_path / "linked").symlink_to("hub")  # the directory itself may be one
    (stranger / "data" / "c.txt").unlink()
    assert len(texts(_source(tmp_path, dataset="./linked"))) == 2
    # What the source itself names may be elsewhere.
    assert texts(_source(tmp_path, hf_data_files="../secret.txt")) == ["text of secret.txt"]


def test_a_saved_dataset_whose_state_names_a_file_outside_is_refused(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["secret"]}).save_to_disk(str(tmp_path / "other"))
    _save(tmp_path, {"text": ["own"]})
    (arrow,) = (tmp_path / "other").glob("*.arrow")
    state = tmp_path / "hub" / "state.json"
    saved = json.loads(state.read_text())
    for name in (f"../other/{arrow.name}", str(arrow)):
        state.write_text(json.dumps(saved | {"_data_files": [{"filename": name}]}))
        with refused("E-SOURCE-OUTSIDE", naming=[arrow.name]):
            records(_source(tmp_path))
    state.unlink()
    described = tmp_path / "hub" / "dataset_dict.json"
    described.write_text('{"splits": ["../other"]}')
    source = _source(tmp_path, hf_split="train")
    source.split = "../other"  # no setting can name it
    with refused("E-SOURCE-OUTSIDE", naming=[arrow.name]):
        records(source)
    described.write_text('{"splits": ["train"]}')
    (tmp_path / "hub" / "train").symlink_to("../other")
    with refused("E-SOURCE-LINK", naming=[arrow.name]):
        records(_source(tmp_path))
    assert texts(_source(tmp_path, follow_links=True)) == ["secret"]


@pytest.mark.parametrize("place", ["{base}/secret.txt", "file://{base}/x.txt", "s3://mine/x.json"])
def test_a_dataset_of_the_hub_reads_nothing_of_this_machine_or_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    hub, file = Hub(tmp_path, monkeypatch), place.format(base=tmp_path)
    (hub.repository / "a.jsonl").write_text('{"text": "a"}\n')
    load = datasets.load_dataset_builder

    def naming_more(*args: Any, **options: Any) -> Any:
        builder = load(*args, **options)
        builder.config.data_files["train"].append(file)
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", naming_more)
    with refused("E-SOURCE-OUTSIDE", naming=["org/name", file]):
        records(_source(tmp_path, dataset="org/name"))
