"""Committed trees on stores: an S3-compatible server on this machine, and `file://`."""

import json
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader import open_loader, resolve_plan
from loader.errors import NmoeError
from loader.files.addresses import join
from loader.files.stores import store
from nmoe_core.cli import main
from nmoe_core.shards.publish.send import publish
from tests.project import contents, json_lines, read_rows, serving
from tests.refusals import refused, refused_line

pytest.importorskip("obstore", reason="extra remote is not installed")
Names = list[str]


@pytest.fixture
def plan(prepared_data: Path) -> Path:
    """A plan over two prepared sources, `web` and `books`."""
    return write_plan(prepared_data)


def write_plan(data: Path, where: str = "../loader_plan.json") -> Path:
    rows = [{"path": str(data / name), "weight": 1} for name in ("web", "books")]
    made = resolve_plan({"datasets": rows, "batch_size": 2, "seq_len": 64})
    path = data / where
    path.write_text(made.placed_in(path.parent).to_json())
    return path


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where to publish to."""
    if request.param == "file":
        return f"file://{tmp_path}/store/corpus 1"
    request.getfixturevalue("s3")
    return "s3://corpus/corpus 1"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Names:
    """Names of the files that are written to a store, in order; deleted ones begin with `-`."""
    names: Names = []
    for word, mark in (("write", ""), ("remove", "-")):
        call = getattr(store, word)

        def noted(url: str, *content: Any, call: Any = call, mark: str = mark) -> Any:
            names.append(mark + url.rpartition("corpus 1/")[2])
            return call(url, *content)

        monkeypatch.setattr(store, word, noted)
    return names


def files_of(data: Path) -> dict[str, bytes]:
    """The committed files of both sources, by their names below a URL."""
    found = [path for name in ("web", "books") for path in (data / name).rglob("*.*")]
    names = {path.relative_to(data).as_posix(): path for path in found}
    return {name: path.read_bytes() for name, path in names.items() if "/." not in name}


def batches(where: object, **options: Any) -> list[np.ndarray]:
    loader = open_loader(where, backend="numpy", **options)
    return [np.concatenate(batch) for batch in loader]


def at(url: str, name: str) -> bytes | None:
    return store.read_bytes(join(url, name))


@pytest.mark.parametrize("place", ["../loader_plan.json", "plans/plan.json"])
def test_a_published_plan_is_read_as_the_local_one_and_its_files_are_equal(
    prepared_data: Path, url: str, tmp_path: Path, place: str
) -> None:
    (prepared_data / "plans").mkdir()
    plan = write_plan(prepared_data, place)
    facts = publish(plan, url).facts
    assert facts["url"] == join(url, place.removeprefix("../"))
    remote = batches(facts["url"], cache_dir=tmp_path / "cache")
    np.testing.assert_array_equal(remote, batches(plan))
    assert {name: at(url, name) for name in files_of(prepared_data)} == files_of(prepared_data)
    if place == "plans/plan.json":
        assert at(url, place) == plan.read_bytes()


def test_data_come_before_manifests_these_before_the_plan_and_a_second_time_sends_nothing(
    plan: Path, url: str, written: Names
) -> None:
    dry = publish(plan, url, is_dry=True).facts
    assert written == []
    made = publish(plan, url)
    written = [name.replace("train/blocks", "train/shard_0000/manifest") for name in written]
    tiers = [name.count("/") if name.endswith("manifest.json") else 9 for name in written[:-2]]
    assert tiers == sorted(tiers, reverse=True)  # files, 3: of shards, 2: of splits
    assert written[-2:] == ["loader_plan.json", "publication.json"]
    assert len(written) == made.facts["files"] + 1 == dry["files_sent"] + 1
    assert made.facts["bytes_sent"] == dry["bytes_sent"] == dry["bytes"]
    written.clear()
    again = publish(plan, url)
    assert (written, again.facts["files_sent"], again.digest) == ([], 0, made.digest)


def test_an_interrupted_publish_goes_on_and_no_reader_sees_its_half(
    plan: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, sent = store.write, 0

    def broken(at: str, content: Any) -> store.Found:
        nonlocal sent
        sent += 1
        if sent == 9:
            raise KeyboardInterrupt
        return write(at, content)

    monkeypatch.setattr(store, "write", broken)
    with pytest.raises(KeyboardInterrupt):
        publish(plan, url)
    assert at(url, "web/train/manifest.json") is None
    with refused("E-PLAN-MISSING", naming=[url]):
        batches(f"{url}/loader_plan.json", cache_dir=tmp_path / "cache")
    monkeypatch.setattr(store, "write", write)
    facts = publish(plan, url).facts
    assert 0 < facts["files_sent"] < facts["files"] - 4
    assert facts["files_replaced"] <= 8  # those that were under way
    remote = batches(f"{url}/loader_plan.json", cache_dir=tmp_path / "cache")
    np.testing.assert_array_equal(remote, batches(plan))


def changed(data: Path) -> Path:
    """The plan after one document of `web` changed, and with it the files of one shard."""
    source = data.parent / "web.jsonl"
    rows = read_rows(source)
    rows[3]["text"] += " and more"
    source.write_text(json_lines(rows))
    flags = ["--paths", str(source), "--name", "web", "--num-shards", "2", "--workers", "1"]
    output = str(data / "web" / "train")
    assert main(["prep", "--source", "jsonl", *flags, "--output", output, "--force"]) == 0
    return write_plan(data)


def test_what_changed_alone_is_sent_after_the_old_version_is_taken_back(
    plan: Path, prepared_data: Path, url: str, tmp_path: Path, written: Names
) -> None:
    publish(plan, url)
    before = files_of(prepared_data)
    plan = changed(prepared_data)
    now = files_of(prepared_data)
    differ = {name for name, content in now.items() if before[name] != content}
    assert {name.rpartition("/")[2].rpartition(".")[2] for name in differ} >= {"npy", "jsonl"}
    assert sum(name.endswith(".npy") for name in differ) == 1
    written.clear()
    publish(plan, url)
    gone = [name.removeprefix("-") for name in written if name.startswith("-")]
    assert gone[:2] == ["loader_plan.json", "web/train/manifest.json"]
    assert gone == [name[1:] for name in written[: len(gone)]]  # before any file is replaced
    differ |= {"web/train/blocks.json", "loader_plan.json", "publication.json"}
    assert set(written[len(gone) :]) == differ
    remote = batches(f"{url}/loader_plan.json", cache_dir=tmp_path / "cache")
    np.testing.assert_array_equal(remote, batches(plan))


def test_a_reader_never_gets_a_row_of_the_version_that_is_published_while_it_reads(
    plan: Path, prepared_data: Path, url: str, tmp_path: Path
) -> None:
    """It reads on what is unchanged, and ends with one error where its file was replaced."""
    expected = batches(plan)
    publish(plan, url)
    found = []
    refusal = None
    loader = open_loader(f"{url}/loader_plan.json", backend="numpy", cache_dir=tmp_path / "cache")
    try:
        for number, batch in enumerate(loader):
            found.append(np.concatenate(batch))
            if number == 1:
                publish(changed(prepared_data), url)
    except NmoeError as error:
        refusal = error
    np.testing.assert_array_equal(found, expected[: len(found)])
    assert refusal is not None or len(found) == len(expected)
    fresh = batches(f"{url}/loader_plan.json", cache_dir=tmp_path / "fresh")
    np.testing.assert_array_equal(fresh, batches(plan))


def test_a_file_that_another_hand_replaced_in_the_store_is_sent_again(
    plan: Path, url: str, written: Names
) -> None:
    publish(plan, url)
    name = next(name for name in written if name.endswith(".npy"))
    content = at(url, name)
    assert content is not None
    store.write(join(url, name), content[::-1])
    written.clear()
    publish(plan, url)
    assert [one for one in written if not one.endswith(".json")] == [name]
    assert at(url, name) == content


def test_damaged_local_data_are_refused_and_do_not_take_a_published_version_back(
    plan: Path, prepared_data: Path, url: str, written: Names
) -> None:
    publish(plan, url)
    path = sorted((prepared_data / "web").rglob("*.npy"))[0]
    good = path.read_bytes()
    name = path.relative_to(prepared_data).as_posix()
    store.write(join(url, name), b"other")
    written.clear()
    path.write_bytes(good[:-4] + b"\1\0\0\0")
    with refused("E-SHARD-CHECKSUM", naming=[str(path)]):
        publish(plan, url)
    assert written == []
    path.unlink()
    with refused("E-SHARD-MISSING", naming=[str(path)]):
        publish(plan, url)


@pytest.mark.parametrize(
    "damage", [b"", b"[1]", b"{", b"[" * 10**5, b'{"format": "nmoe-publication/1"}']
)
def test_a_damaged_record_makes_everything_be_sent_again(
    plan: Path, url: str, damage: bytes
) -> None:
    publish(plan, url)
    store.write(f"{url}/publication.json", damage)
    facts = publish(plan, url).facts
    assert facts["files_sent"] == facts["files_replaced"] == facts["files"]
    assert publish(plan, url).facts["files_sent"] == 0


def test_one_splits_manifest_is_published_alone_from_its_directory(
    prepared_data: Path, url: str, tmp_path: Path
) -> None:
    directory = prepared_data / "web" / "train"
    assert publish(directory, url).facts["url"] == join(url, "manifest.json")
    run = {"batch_size": 2, "seq_len": 64}
    remote = batches(run | {"data_path": url}, cache_dir=tmp_path / "cache")
    np.testing.assert_array_equal(remote, batches(run | {"data_path": str(directory)}))


# One line each


def test_data_are_not_published_onto_themselves(
    prepared_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, split = contents(prepared_data), prepared_data / "web" / "train"
    line = refused_line(capsys, "publish", str(split), f"file://{split}", code="E-CONFIG")
    assert "use another URL" in line
    assert before.items() <= contents(prepared_data).items()


class Web(SimpleHTTPRequestHandler):
    """A directory that takes files, for one user."""

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def parse_request(self) -> bool:
        is_good = super().parse_request()
        if is_good and self.headers["Authorization"] != "Basic dXNlcjpwYS9zcw==":
            self.send_error(401)
            return False
        return is_good

    def do_PUT(self) -> None:
        path = Path(self.translate_path(self.path))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(201)
        self.send_header("Content-Length", "0")
        self.end_headers()


def test_a_web_server_takes_a_plan_with_a_password_that_no_message_shows(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    (tmp_path / "www").mkdir()
    with serving(partial(Web, directory=str(tmp_path / "www"))) as (host, _):
        url = f"http://user:pa%2Fss@{host}/corpus"
        assert main(["publish", str(plan), url]) == 0
        said = capsys.readouterr().out
        assert f"http://[hidden]@{host}/corpus/loader_plan.json" in said
        remote = batches(f"{url}/loader_plan.json", cache_dir=tmp_path / "cache")
        np.testing.assert_array_equal(remote, batches(plan))
        line = refused_line(capsys, "publish", str(plan), f"http://user:bad@{host}/corpus")
        assert "401 Unauthorized" in line
    line += refused_line(capsys, "publish", str(plan), f"{url}?sig=0123abc", code="E-STORE")
    assert not any(part in said + line for part in ("user", "pa%2F", "pa/ss", "bad", "0123abc"))


def test_a_store_that_refuses_or_is_down_is_one_line_without_keys(
    plan: Path, s3: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "verysecret")
    line = refused_line(capsys, "publish", str(plan), "s3://nowhere/x", code="E-STORE")
    assert "NoSuchBucket" in line
    assert "s3://nowhere/x/" in line
    s3[1].stop()
    down = refused_line(capsys, "publish", str(plan), "s3://corpus/x", code="E-STORE")
    assert "s3://corpus/x/publication.json" in down
    assert "Connect" in down
    assert max(len(line), len(down)) < 400
    assert "verysecret" not in line + down
    for bad in ("memory://b/x", "corpus"):
        refused_line(capsys, "publish", str(plan), bad, code="E-CONFIG")


# Read there


def said(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    capsys.readouterr()
    assert main(argv) == status
    found = capsys.readouterr()
    return found.out or found.err


@pytest.mark.parametrize("tier", [[], ["--checksums"], ["--deep"]])
@pytest.mark.parametrize("name", ["loader_plan.json", "web/train", "web/train/manifest.json"])
def test_verify_and_info_say_of_a_url_what_they_say_of_files(
    prepared_data: Path, url: str, capsys: pytest.CaptureFixture[str], name: str, tier: Names
) -> None:
    publish(write_plan(prepared_data, "loader_plan.json"), url)
    for command in (["verify", *tier], ["info"], ["info", "--json"]):
        here, there = (said(capsys, *command, f"{top}/{name}") for top in (prepared_data, url))
        assert there == here.replace(str(prepared_data), url)


@pytest.mark.parametrize(
    ("damage", "tier", "code"),
    [
        (lambda _: None, [], "E-SHARD-MISSING"),
        (lambda content: content[:-4], [], "E-SHARD-TRUNCATED"),
        (lambda content: content[:-8] + b"\1\0\0\0" + content[-4:], ["--deep"], "E-SHARD-CHECKSUM"),
    ],
    ids=["gone", "cut", "changed"],
)
def test_a_damaged_object_is_refused_by_its_url(
    plan: Path,
    url: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    damage: Callable[[bytes], bytes | None],
    tier: Names,
    code: str,
) -> None:
    publish(plan, url)
    name = next(n for n in files_of(plan.resolve().parent / "data") if n.endswith(".npy"))
    content = damage(at(url, name) or b"")
    if content is None:
        store.remove(join(url, name))
    else:
        store.write(join(url, name), content)
    found = said(capsys, "verify", *tier, f"{url}/loader_plan.json", status=1)
    lines = [line for line in found.splitlines() if join(url, name) in line]
    assert lines[0].startswith(f"ERROR [{code}]: {join(url, name)}: ")
    with refused(code.replace("TRUNCATED", "CHECKSUM"), naming=[join(url, name)]):
        batches(f"{url}/loader_plan.json", cache_dir=tmp_path / "cache")


def test_what_is_not_published_or_not_a_manifest_is_one_line_with_its_url(
    plan: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(plan, url)
    for verb in ("verify", "info"):
        assert f"{url}/x/manifest.json" in refused_line(
            capsys, verb, f"{url}/x", code="E-MANIFEST-MISSING"
        )
        line = refused_line(capsys, verb, f"{url}/publication.json", code="E-MANIFEST-FORMAT")
        assert f"{url}/publication.json" in line
        store.write(f"{url}/deep.json", b"[" * 10**5)
        assert f"{url}/deep.json" in refused_line(
            capsys, verb, f"{url}/deep.json", code="E-MANIFEST-FORMAT"
        )
    no_text = json.loads(at(url, "loader_plan.json") or b"") | {"plan_hash": "\ud800"}
    store.write(f"{url}/no_text.json", json.dumps(no_text).encode())
    refused_line(capsys, "verify", f"{url}/no_text.json", code="E-PLAN-HASH")
    store.remove(f"{url}/web/train/shard_0001/manifest.json")
    line = refused_line(capsys, "verify", f"{url}/web/train", code="E-MANIFEST-MISSING")
    assert f"{url}/web/train/shard_0001/manifest.json" in line


def test_a_step_is_explained_by_the_plans_url_as_by_its_path(
    plan: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(plan, url)
    command = ["explain", "--step", "3", "--json", "--cache-dir", str(tmp_path / "cache")]
    local = said(capsys, *command, "--plan", str(plan))
    assert json.loads(local)["rows"][0]["documents"][0]["ingest_id"].startswith(("web-", "books-"))
    for _ in range(2):
        assert said(capsys, *command, "--plan", f"{url}/loader_plan.json") == local
    for path in (tmp_path / "cache").rglob("*.ids.jsonl"):  # as of a version published before
        path.write_bytes(path.read_bytes().replace(b"-", b"+"))
    assert said(capsys, *command, "--plan", f"{url}/loader_plan.json") == local
    refused_line(capsys, "explain", "x", "--plan", str(plan), code="E-CONFIG")
    refused_line(capsys, "explain", "--step", "3", code="E-CONFIG")


@pytest.mark.parametrize(
    "place", ["file://relative/x", "file://{}/a#b", "file://{}/a?b", "s3://b/a#c"]
)
def test_a_url_whose_files_would_lie_elsewhere_is_refused_before_anything_is_sent(
    plan: Path, place: str, tmp_path: Path, written: Names
) -> None:
    with refused("E-CONFIG"):
        publish(plan, place.format(tmp_path))
    assert written == []
    assert not (tmp_path / "a").exists()


def test_a_bucket_that_does_not_exist_is_named(
    s3: object, capsys: pytest.CaptureFixture[str]
) -> None:
    where = "s3://nosuchbucket/run/loader_plan.json"
    assert "NoSuchBucket" in refused_line(capsys, "verify", where, code="E-STORE")
