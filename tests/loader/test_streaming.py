"""Tokens read from a store in blocks, through a cache that keeps to its limit."""

import hashlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from loader import resolve_plan
from loader.__main__ import main
from loader.errors import ConfigError
from loader.files import block_files
from loader.files.block_cache import BlockCache
from loader.files.block_files import BlockFiles, StoreData
from loader.files.blocks import write_blocks
from loader.files.checksummed_json import sealed
from loader.files.format import load_manifest
from loader.files.locks import locked
from tests.loader.shared import is_interrupted, open_loader
from tests.project import serving
from tests.refusals import refused

pytest.importorskip("obstore")
LIMIT = 16 * 1024  # of data of 64 KB
BLOCK = 1024


class Ranges(SimpleHTTPRequestHandler):
    """Files of a directory, with ranges; counts the bytes of shards that it gives."""

    protocol_version = "HTTP/1.1"
    given: list[int]
    broken: dict[str, int]  # status of paths that hold this text; 1: their middle never comes
    answers: threading.Event  # while it is cleared, broken paths get no answer
    at_a_time: list[int]  # requests of shards without an answer, whenever one begins
    answered: list[int]
    lock: threading.Lock
    delay: Callable[[], object]  # before a range of a shard is given

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        """A file, or the range of it that is asked for."""
        path = Path(self.translate_path(self.path))
        status = next((code for text, code in self.broken.items() if text in self.path), 0)
        if status and not self.answers.is_set():
            self.answers.wait(20)
            self.close_connection = True
            return
        if status > 1 or not path.is_file():
            self.send_error(status or 404)
            return
        content, asked = path.read_bytes(), self.headers.get("Range")
        part, first = content, 0
        if asked:
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            part = content[first : last + 1]
            self.given.append(len(part))
            self.at_a_time.append(len(self.given) - self.answered[0])
            self.delay()
            with self.lock:
                self.answered[0] += 1
        self.send_response(206 if asked else 200)
        if asked:
            of = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
            self.send_header("Content-Range", of)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(part[: len(part) // 2] if status == 1 else part)
        self.close_connection = status == 1


@pytest.fixture
def bucket(two_stages, tmp_path) -> Path:
    """What a store holds: `plans/plan.json`, and `data/` with its blocks."""
    shutil.copytree(two_stages.tree.root, tmp_path / "bucket" / "data")
    for manifest in (tmp_path / "bucket").rglob("manifest.json"):
        write_blocks(load_manifest(manifest), BLOCK)
    (tmp_path / "bucket" / "plans").mkdir()
    save(resolve_plan(two_stages.cfg), tmp_path / "bucket")
    return tmp_path / "bucket"


def save(plan, bucket: Path) -> None:
    value = json.loads(plan.to_json()) | {"root": "../data"}
    (bucket / "plans" / "plan.json").write_text(json.dumps(value))


@pytest.fixture
def web(bucket, monkeypatch):
    """The plan's URL at a server of HTTP on this machine, and the server's handler."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    own = {"given": [], "broken": {}, "at_a_time": [], "answered": [0]}
    own |= {"answers": threading.Event(), "lock": threading.Lock(), "delay": lambda self: None}
    kind = type("Handler", (Ranges,), own)
    kind.answers.set()
    with serving(partial(kind, directory=str(bucket))) as (host, _):
        yield f"http://{host}/plans/plan.json", kind
        kind.answers.set()


@pytest.fixture(params=["file", "http", "s3"])
def url(request, bucket) -> str:
    if request.param == "file":
        return f"file://{bucket}/plans/plan.json"
    if request.param == "http":
        return request.getfixturevalue("web")[0]
    store, _ = request.getfixturevalue("s3")
    store.put(f"{bucket}/", "corpus/", recursive=True)
    return "s3://corpus/plans/plan.json"


def stream(url: str, tmp_path: Path, **options):
    options = {"cache_bytes": LIMIT, "cache_dir": tmp_path / "cache"} | options
    return open_loader(url, **options)


def used(tmp_path: Path) -> int:
    """Bytes of the cache at one moment: none is written or deleted while its lock is held."""
    directory = tmp_path / "cache" / "blocks"
    with locked(directory / "locks" / "room"):
        return sum(path.stat().st_size for path in directory.iterdir() if path.is_file())


def check_equal(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("settings", [{}, {"packing": "best_fit"}, {"window_stride": "seq_len+1"}])
def test_a_streamed_plan_gives_the_batches_of_files(url, bucket, two_stages, tmp_path, settings):
    cfg = two_stages.cfg | settings
    if settings.get("packing") == "best_fit":
        cfg |= {"on_exhaust": "first_exhausted"}
    save(resolve_plan(cfg), bucket)
    if url.startswith("s3"):
        pytest.importorskip("s3fs").S3FileSystem().put(f"{bucket}/", "corpus/", recursive=True)
    for split in ("train", "valid"):
        with stream(url, tmp_path, split=split) as loader:
            for (a, b), (c, d) in zip(loader, open_loader(cfg, split=split), strict=True):
                np.testing.assert_array_equal(a, c)
                np.testing.assert_array_equal(b, d)
                assert used(tmp_path) <= LIMIT


def test_each_byte_is_requested_once_and_a_resumed_rank_reads_only_its_own(
    web, two_stages, tmp_path
):
    url, handler = web
    with stream(url, tmp_path) as loader:
        num_batches = sum(1 for _ in loader)
    plan = loader.plan
    need = sum((n := plan.taken()[s.name]) and 4 * (16 * n + 1) for s in plan.sources)
    assert sum(handler.given) <= 1.05 * need + BLOCK * len(plan.sources)
    with stream(url, tmp_path, rank=1, world_size=2) as loader:
        loader.seek_step(7)
        local = open_loader(two_stages.cfg, 1, 2)
        local.seek_step(7)
        for _ in range(num_batches - 7):
            check_equal(loader.next(), local.next())


def test_spans_and_documents_equal_those_read_from_files(web, two_stages, tmp_path):
    with stream(web[0], tmp_path) as loader, open_loader(two_stages.cfg) as local:
        for _ in range(5):
            check_equal(
                loader.next_with_meta().document_spans, local.next_with_meta().document_spans
            )


@contextmanager
def peak_of(tmp_path: Path) -> Iterator[list[int]]:
    """The most bytes that the cache holds meanwhile."""
    peak, is_over = [0], threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            with suppress(FileNotFoundError):  # before there is a cache
                peak[0] = max(peak[0], used(tmp_path))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        is_over.set()
        watcher.join()


def test_ranks_of_a_machine_share_a_cache_and_its_limit(web, two_stages, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with peak_of(tmp_path) as peak:
        ranks = [stream(web[0], tmp_path, rank=r, world_size=3) for r in range(3)]
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(list, ranks))
    assert 0 < peak[0] <= LIMIT
    for rank, batches in enumerate(found):
        for batch, local in zip(batches, open_loader(two_stages.cfg, rank, 3), strict=True):
            check_equal(batch, local)


RANK = """
import hashlib, sys, numpy
from loader import open_loader
found = hashlib.sha256()
loader = open_loader(sys.argv[1], backend="numpy", cache_dir=sys.argv[2], cache_bytes=16 * 1024)
for batch in loader:
    for part in batch:
        found.update(numpy.ascontiguousarray(part).tobytes())
print(found.hexdigest())
"""


def test_ranks_continue_after_one_of_them_is_killed(web, two_stages, tmp_path):
    url, handler = web
    is_killed, ranks = threading.Event(), []
    # Of more than sixty blocks; so no rank ends before one is killed.
    handler.delay = lambda self: len(self.given) < 20 or is_killed.wait(120)
    with peak_of(tmp_path) as peak:
        for rank in range(3):
            own = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
            command = [sys.executable, "-c", RANK, url, str(tmp_path / "cache")]
            env = os.environ | own
            ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        while len(handler.given) < 20:
            assert all(rank.poll() is None for rank in ranks)
            time.sleep(0.001)
        ranks[1].kill()
        is_killed.set()
        said = [rank.communicate()[0].strip() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, -9, 0]
    for rank in (0, 2):
        expected = hashlib.sha256()
        for batch in open_loader(two_stages.cfg, rank, 3):
            for part in batch:
                expected.update(np.ascontiguousarray(part).tobytes())
        assert said[rank] == expected.hexdigest()
    assert 0 < peak[0] <= LIMIT
    left = [path.name for path in (tmp_path / "cache" / "blocks").iterdir() if path.is_file()]
    assert all(len(name) == 64 for name in left)  # blocks, and no part of one


def wait_in_line(handler: Ranges) -> None:
    """A store whose bandwidth all requests share."""
    with handler.lock:
        time.sleep(0.01)  # of sixteen that begin together, the first is seen to be faster


@pytest.mark.parametrize("shares", [True, False])
def test_more_requests_are_made_at_a_time_where_they_bring_more(web, bucket, tmp_path, shares):
    for manifest in bucket.rglob("manifest.json"):
        write_blocks(load_manifest(manifest), 256)
    url, handler = web
    handler.delay = wait_in_line if shares else lambda self: time.sleep(0.15)
    with stream(url, tmp_path, cache_bytes=10**6) as loader:
        list(loader)
    assert len(handler.given) > 100
    if shares:
        assert max(handler.at_a_time) <= 16
    else:
        assert 16 < max(handler.at_a_time) <= 64


@pytest.mark.parametrize(
    ("silent", "attempts"),
    [("plan.json", "1"), ("manifest.json", "1"), ("blocks.json", "1"), (".npy", "1"), (".npy", "")],
)
def test_a_store_that_never_answers_is_one_error(web, tmp_path, monkeypatch, silent, attempts):
    monkeypatch.setenv("NMOE_STORE_TIMEOUT_S", "0.3")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", attempts)
    url, handler = web
    handler.broken[silent] = 500
    handler.answers.clear()
    with (
        refused("E-STORE", match="Time", naming=[silent]) as caught,
        stream(url, tmp_path) as loader,
    ):
        list(loader)
    assert "\n" not in str(caught.value)
    handler.broken.clear()
    assert len(list(stream(url, tmp_path)))


def test_requests_to_a_store_that_refuses_are_repeated_for_a_limited_time(
    web, tmp_path, monkeypatch
):
    """Its client would ask eleven times, and wait longer before each."""
    monkeypatch.setenv("NMOE_STORE_TIMEOUT_S", "0.05")
    monkeypatch.delenv("AWS_MAX_ATTEMPTS")
    url, handler = web
    asked = []

    def refuse(self) -> None:
        asked.append(self.path)
        self.send_error(503)

    monkeypatch.setattr(handler, "do_GET", refuse)
    with refused("E-STORE", naming=["plan.json"]):
        stream(url, tmp_path)
    assert len(asked) in range(1, 11)


def test_a_whole_file_that_breaks_off_is_an_error_of_the_store(web, tmp_path):
    url, handler = web
    handler.broken[".npy"] = 1
    with refused("E-STORE", naming=[".npy"]):
        open_loader(url, cache_dir=tmp_path / "cache")


def test_a_closed_loader_asks_for_no_block_that_has_waited_for_its_turn(web, tmp_path, monkeypatch):
    monkeypatch.setattr(block_files, "_REQUESTS", 4)
    monkeypatch.setattr(block_files._Requests, "_count", lambda *_: None)  # no more than these
    url, handler = web
    asked, numbers, goes_on = [], itertools.count(), threading.Event()

    def delay(self) -> None:
        number = next(numbers)
        asked.append(number)
        if number >= 12:
            goes_on.wait(60)

    handler.delay = delay
    with stream(url, tmp_path, cache_bytes=10**6) as loader:
        loader.next()
        while len(asked) < 12 + 4:
            time.sleep(0.01)
    goes_on.set()
    while any(thread.name.startswith("ThreadPool") for thread in threading.enumerate()):
        time.sleep(0.01)
    assert len(asked) == 12 + 4


@pytest.mark.parametrize("value", ["0", "-1", "soon", "1e9"])
def test_a_timeout_that_is_no_time_is_refused(web, tmp_path, monkeypatch, value):
    monkeypatch.setenv("NMOE_STORE_TIMEOUT_S", value)
    with refused("E-CONFIG", naming=["NMOE_STORE_TIMEOUT_S", value]):
        stream(web[0], tmp_path)


@pytest.mark.parametrize("record", [b"", b"\xff 12"])
def test_a_damaged_block_of_the_cache_is_fetched_again(web, two_stages, tmp_path, record):
    with stream(web[0], tmp_path, cache_bytes=10**6) as loader:
        list(loader)
    blocks = [path for path in (tmp_path / "cache" / "blocks").iterdir() if path.is_file()]
    blocks[0].write_bytes(b"damaged")
    blocks[1].write_bytes(bytes(blocks[1].stat().st_size))
    # Of a process that was killed: a part of a block, and a record of the bytes without its number.
    (tmp_path / "cache" / "blocks" / ".part").write_bytes(b"damaged")
    (tmp_path / "cache" / "blocks" / "locks" / "bytes").write_bytes(record)
    for found, local in zip(stream(web[0], tmp_path), open_loader(two_stages.cfg), strict=True):
        check_equal(found, local)
    assert used(tmp_path) <= LIMIT


def test_a_cache_that_is_deleted_meanwhile_is_filled_again(web, two_stages, tmp_path):
    with stream(web[0], tmp_path, cache_bytes=10**6) as loader:
        for number, local in enumerate(open_loader(two_stages.cfg)):
            check_equal(next(loader), local)
            if number % 3 == 0:
                shutil.rmtree(tmp_path / "cache" / "blocks", ignore_errors=True)
    assert used(tmp_path) > 0


def damage(bucket: Path) -> None:
    for path in (bucket / "data" / "web").rglob("*.npy"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        content[200] ^= 1
        path.write_bytes(content)


def shorten(bucket: Path) -> None:
    for path in (bucket / "data" / "web").rglob("*.npy"):
        os.truncate(path, 300)


@pytest.mark.parametrize(
    ("harm", "status", "code"),
    [
        (damage, 0, "E-BLOCK-CHECKSUM"),
        (shorten, 0, "E-BLOCK-CHECKSUM"),
        (None, 404, "E-SHARD-MISSING"),
        (None, 403, "E-STORE"),
        (None, 503, "E-STORE"),
        (None, 1, "E-STORE"),
    ],
)
def test_wrong_content_from_a_store_is_one_error(web, bucket, tmp_path, harm, status, code):
    url, handler = web
    if harm:
        harm(bucket)
    if status:
        handler.broken[".npy"] = status
    with stream(url, tmp_path) as loader:
        for _ in range(2):  # and again: what failed is asked for anew
            with refused(code, naming=[url.rpartition("/plans")[0]]) as caught:
                list(loader)
            assert "\n" not in str(caught.value)
    if not harm:
        handler.broken.clear()
        assert len(list(stream(url, tmp_path)))


def test_blocks_are_parsed_once_in_a_process(bucket, tmp_path, monkeypatch):
    url = f"file://{bucket}/plans/plan.json"
    stream(url, tmp_path).close()
    monkeypatch.setattr("loader.files.blocks.read_json_object", lambda path: pytest.fail(str(path)))
    for rank in range(2):
        assert len(list(stream(url, tmp_path, rank=rank, world_size=2))) > 0


def test_data_without_blocks_of_their_own_are_refused(bucket, tmp_path):
    url, sidecar = f"file://{bucket}/plans/plan.json", bucket / "data/web/train/blocks.json"
    good = sidecar.read_text()
    for text in (None, "{}", good.replace("0", "1", 1), (bucket / "data/code/train/blocks.json")):
        sidecar.unlink()
        if text is not None:
            sidecar.write_text(text.read_text() if isinstance(text, Path) else text)
        else:
            with refused("E-BLOCKS", naming=["python -m loader blocks"]):
                stream(url, tmp_path)
            sidecar.write_text("{}")
        with refused("E-BLOCKS"):
            stream(url, tmp_path)
    sidecar.write_text(json.dumps(sealed(json.loads(good) | {"manifest": "0" * 64})))
    with refused("E-BLOCKS", naming=["0" * 64]):  # whole, but of another manifest
        stream(url, tmp_path)
    sidecar.write_text(good)
    assert len(stream(url, tmp_path)) > 0


@pytest.mark.parametrize("cache_bytes", [0, 7 * BLOCK])
def test_a_cache_of_a_few_blocks_is_refused(bucket, tmp_path, cache_bytes):
    with refused("E-CONFIG", naming=["cache_bytes"]):
        stream(f"file://{bucket}/plans/plan.json", tmp_path, cache_bytes=cache_bytes)


@pytest.mark.parametrize(("key", "least"), [("shuffle", 62_000), ("shuffle_blocks", 24_000)])
def test_a_shuffled_plan_needs_a_cache_that_holds_it(
    bucket, two_stages, tmp_path, key, least, monkeypatch
):
    monkeypatch.setattr("loader.plan.streaming.SHUFFLED_TOKENS", 1000)
    cfg = two_stages.cfg | {key: True}
    save(resolve_plan(cfg), bucket)
    url = f"file://{bucket}/plans/plan.json"
    with refused("E-CONFIG", naming=["cache_bytes", "shuffle", f"at least {least};"]):
        stream(url, tmp_path, cache_bytes=least - 1)
    for found, local in zip(
        stream(url, tmp_path, cache_bytes=least), open_loader(cfg), strict=True
    ):
        check_equal(found, local)


def test_blocks_are_of_plans_in_stores_alone(two_stages, plan_file, tmp_path):
    for cfg in (two_stages.cfg, plan_file, str(plan_file)):
        with refused("E-CONFIG", naming=["cache_bytes"]):
            open_loader(cfg, cache_bytes=LIMIT, cache_dir=tmp_path)


def test_the_command_writes_blocks_beside_every_manifest(plan_file, bucket, tmp_path, capsys):
    for old in bucket.rglob("blocks.json"):
        old.unlink()
    plan = bucket / "plans" / "plan.json"
    assert main(["blocks", str(plan)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(list(bucket.rglob("blocks.json"))) == 6
    assert len(stream(f"file://{plan}", tmp_path, cache_bytes=10**6)) > 0


def test_an_interrupt_at_any_line_leaves_a_block_that_can_be_read_again(bucket, tmp_path):
    directory = bucket / "data" / "web" / "train"
    manifests, urls = [load_manifest(directory / "manifest.json")], [f"file://{directory}/x"]
    data = StoreData(f"file://{bucket}", tmp_path, LIMIT, 1)
    expected = BlockFiles(manifests, urls, data, False).tokens(0).tolist()
    for line in itertools.count():
        files = BlockFiles(manifests, urls, data, False)
        is_cut = is_interrupted(partial(files.tokens, 0), line)
        for _ in range(2):
            assert files.tokens(0).tolist() == expected
        if not is_cut:
            assert line > 10
            break


def test_a_forked_worker_is_refused_and_a_spawned_one_reads(bucket, two_stages, tmp_path):
    torch_data = pytest.importorskip("loader.torch_data", reason="torch is not installed")
    from torch.utils.data import DataLoader

    url = f"file://{bucket}/plans/plan.json"
    data = torch_data.StepDataset(url, cache_bytes=LIMIT, cache_dir=tmp_path / "cache")
    forked = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork")
    batches = iter(forked)  # its worker lives as long as this, and must hold no lock of the cache
    with pytest.raises(ConfigError, match="spawn"):
        next(batches)
    spawned = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    check_equal(next(iter(spawned)), open_loader(two_stages.cfg).next())


def test_workers_of_a_loader_are_spawned_where_its_tokens_come_from_a_store(
    bucket, two_stages, tmp_path
):
    pytest.importorskip("torch")
    url, cache = f"file://{bucket}/plans/plan.json", tmp_path / "cache"
    options = {"num_workers": 1, "cache_bytes": LIMIT, "cache_dir": cache, "backend": "torch"}
    with open_loader(url, **options) as loader:
        check_equal(loader.next(), open_loader(two_stages.cfg).next())
    with (
        open_loader(url, multiprocessing_context="fork", **options) as loader,
        pytest.raises(ConfigError, match="spawn"),
    ):
        loader.next()


def test_a_process_forked_while_a_block_is_fetched_keeps_no_lock(tmp_path):
    cache, end = BlockCache(tmp_path, 100), get_context("fork").Event()
    child = get_context("fork").Process(target=end.wait, daemon=True)

    def fetch() -> bytes:
        child.start()
        return b"x"

    digest = hashlib.sha256(b"x").hexdigest()
    cache.get(digest, fetch)
    cache.path(digest).unlink()
    assert cache.get(digest, lambda: b"x")
    end.set()
    child.join()


def test_processes_that_want_one_block_fetch_it_once(tmp_path):
    cache, asked = BlockCache(tmp_path, 100), []

    def fetch() -> bytes:
        asked.append(1)
        time.sleep(0.05)
        return b"x"

    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: cache.get(digest, fetch), range(4)))
    assert (sum(found), len(asked)) == (1, 1)
    assert cache.is_whole(digest)


def test_a_full_cache_evicts_the_least_recently_used_blocks(tmp_path):
    cache, digests = BlockCache(tmp_path, 100), []
    for i in range(11):
        content = bytes([i]) * 10
        digests.append(hashlib.sha256(content).hexdigest())
        if i == 10:
            assert all(cache.path(digest).exists() for digest in digests[:10])
            cache.touch(digests[0])
        assert cache.get(digests[-1], lambda content=content: content)
        os.utime(cache.path(digests[-1]), (i, i))
    assert not cache.get(digests[-1], lambda: b"")
    # Room is made for a tenth of the limit.
    assert [cache.is_whole(digest) for digest in digests] == [True, False, False, *[True] * 8]
    cache.path(digests[0]).write_bytes(b"damaged")
    assert not cache.is_whole(digests[0])
    assert not cache.path(digests[0]).exists()


READER = """
import sys
from loader import open_loader
for _ in open_loader(sys.argv[1], backend="numpy", cache_dir=sys.argv[2], cache_bytes=16 * 1024):
    pass
"""


@pytest.mark.slow
def test_readers_that_are_killed_leave_a_cache_that_others_read(web, two_stages, tmp_path):
    url, handler = web
    rng, cut = random.Random(0), 0
    for _ in range(10):
        command = [sys.executable, "-c", READER, url, str(tmp_path / "cache")]
        with subprocess.Popen(command) as reader:
            asked = len(handler.given) + rng.randint(1, 40)
            while len(handler.given) < asked and reader.poll() is None:
                time.sleep(0.0005)
            reader.kill()
        cut += reader.returncode == -9
        assert used(tmp_path) <= LIMIT
    assert cut >= 5
    for found, local in zip(stream(url, tmp_path), open_loader(two_stages.cfg), strict=True):
        check_equal(found, local)
    assert used(tmp_path) <= LIMIT
