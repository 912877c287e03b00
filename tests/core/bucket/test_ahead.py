"""Files of a bucket that are fetched before they are used, and sent before they are complete."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loader.errors import PlanError
from loader.files.stores import objects, store
from nmoe_core.base.atomic import output_lock, write_bytes
from nmoe_core.base.bucket.ahead import fetched_ahead
from nmoe_core.base.bucket.growing import sent_while_growing
from nmoe_core.base.errors import FormatError
from tests.buckets import URL, Machine, counted, digests_of, files_of, put
from tests.project import contents

_FIRST = 8


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmoe_core.base.bucket.growing._PIECE_BYTES", 100)
    monkeypatch.setattr("nmoe_core.base.bucket.growing._LOOK_EVERY_S", 0.001)


def wait_for(is_true: Callable[[], bool]) -> None:
    """Wait until another thread has done something."""
    deadline_s = time.monotonic() + 60
    while not is_true() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert is_true()


def is_here(path: Path) -> bool:
    """Whether this machine has a copy of a file."""
    return Path(str(path)).exists()


def test_files_are_fetched_once_and_before_they_are_used(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    put(one.root, a=b"a", b=b"b", c=b"c")
    paths = [two.root / "data" / name for name in "abc"]
    with counted(monkeypatch) as requests:
        with fetched_ahead([two.root / "data", paths[0]]):
            wait_for(lambda: all(map(is_here, paths)))
        assert [path.read_bytes() for path in paths] == [b"a", b"b", b"c"]
    assert requests["copy"] == 3


def test_what_is_fetched_ahead_stays_within_the_limit_of_local_files(
    machines: tuple[Machine, Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = machines
    put(one.root, **{name: name.encode() * 10_000 for name in "abcd"})
    small = Machine(tmp_path / "small", URL, scratch_gib=25_000 / 2**30)
    with counted(monkeypatch) as requests, fetched_ahead([small.root / "data"]):
        wait_for(lambda: sum(is_here(small.root / "data" / name) for name in "abcd") == 2)
    assert requests["copy"] == 2


def test_readers_of_one_file_fetch_it_once(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    put(one.root, a=b"a" * 1000)
    found: list[bytes] = []
    with counted(monkeypatch) as requests:
        threads = [
            threading.Thread(target=lambda: found.append((two.root / "data" / "a").read_bytes()))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [b"a" * 1000] * 4
    assert requests["copy"] == 1


def test_what_cannot_be_fetched_ahead_is_an_error_of_its_reader(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    put(one.root, a=b"right")
    store.write(f"{URL}/{files_of(URL)['data/a'].object}", b"wrong")
    with counted(monkeypatch) as requests, fetched_ahead([two.root / "data"]):
        wait_for(lambda: requests["copy"] == 1)
    with pytest.raises(FormatError):
        (two.root / "data" / "a").read_bytes()


def test_small_files_of_directories_that_are_read_in_their_order_are_fetched_together(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    with output_lock(one.root / "data"):
        for number in range(6):
            write_bytes(one.root / "data" / f"shard_{number}" / "manifest.json", b"%d" % number)
            write_bytes(one.root / "data" / f"shard_{number}" / "tokens", b"not asked for")
    paths = [two.root / "data" / f"shard_{number}" / "manifest.json" for number in range(6)]
    assert [path.read_bytes() for path in paths[:2]] == [b"0", b"1"]
    with counted(monkeypatch) as requests:
        assert [path.read_bytes() for path in paths[2:]] == [b"2", b"3", b"4", b"5"]
    assert requests["copy"] == 0
    assert not any(is_here(path.with_name("tokens")) for path in paths)


class Growing:
    """A file that is written without its first bytes, which are known at the end."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.staged = Path(str(root)) / ".work"
        self.part = self.staged / "shard_0" / "tokens.npy.part"
        self.final = root / "data" / "shard_0" / "tokens.npy"
        self.content = b"%08d" % 3000 + bytes(range(250)) * 12

    def grow(self) -> Iterator[None]:
        """Write the file in pieces."""
        self.part.parent.mkdir(parents=True, exist_ok=True)
        with open(self.part, "wb") as file:
            file.write(b"\0" * _FIRST)
            for start in range(_FIRST, len(self.content), 500):
                file.write(self.content[start : start + 500])
                file.flush()
                yield
            file.seek(0)
            file.write(self.content[:_FIRST])

    def move(self) -> None:
        """Give the file its final path."""
        final = Path(str(self.final))
        final.parent.mkdir(parents=True, exist_ok=True)
        self.part.rename(final)

    def make(self, is_begun: Callable[[], bool]) -> None:
        """Write, send and commit the file; half of it is written once its upload has begun."""
        with output_lock(self.root / "data"):
            self.send(is_begun)
            self.move()

    def send(self, is_begun: Callable[[], bool]) -> None:
        """Write the file, and send it while it grows."""
        with self.sending():
            writing = self.grow()
            next(writing)
            wait_for(is_begun)
            for _ in writing:
                pass

    def sending(self) -> Any:
        return sent_while_growing(self.staged, self.root / "data", ".part", _FIRST)


def test_a_growing_file_is_sent_before_its_first_bytes_are_known(
    machines: tuple[Machine, Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    growing = Growing(one.root)
    with counted(monkeypatch) as requests:
        growing.make(lambda: requests["write"] == 1)
    assert requests["send"] == 0
    assert digests_of(URL).keys() == {"data/shard_0/tokens.npy"}
    assert contents(two.root) == {"data/shard_0/tokens.npy": growing.content}
    url = f"{URL}/data/shard_0/tokens.npy"
    for span in ((0, 4), (2, 30), (8, 9), (500, 2000), (2990, 9999)):
        assert objects.read_bytes(url, span) == growing.content[slice(*span)], span
    assert objects.read_bytes(url) == growing.content
    assert objects.copy(url, tmp_path / "copy") == files_of(URL)["data/shard_0/tokens.npy"].sha256
    assert objects.copy_start(url, tmp_path / "start", 100)
    assert (tmp_path / "start").read_bytes()[:100] == growing.content[:100]
    assert (tmp_path / "start").stat().st_size == len(growing.content)


def test_equal_bytes_of_a_file_that_was_sent_while_it_grew_are_not_sent_again(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    growing = Growing(one.root)
    with counted(monkeypatch) as requests:
        growing.make(lambda: requests["write"] == 1)
        put(one.root / "more", copy=growing.content)
    assert requests["send"] == 0
    assert (two.root / "more" / "data" / "copy").read_bytes() == growing.content


def test_a_file_that_could_not_be_sent_while_it_grew_is_sent_by_its_commit(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    growing = Growing(one.root)
    down = Down()
    monkeypatch.setattr(store, "write", down)
    growing.make(lambda: down.num_calls == 1)
    assert contents(two.root) == {"data/shard_0/tokens.npy": growing.content}


def test_a_file_that_was_changed_after_it_was_sent_is_sent_again(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    growing = Growing(one.root)
    with counted(monkeypatch) as requests, output_lock(one.root / "data"):
        growing.send(lambda: requests["write"] == 1)
        changed = growing.content[:-1] + b"!"
        growing.part.write_bytes(changed)
        growing.move()
    assert contents(two.root) == {"data/shard_0/tokens.npy": changed}


def test_an_upload_that_fails_is_an_error_of_the_task_and_commits_nothing(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = machines
    with monkeypatch.context() as patch:
        down = Down()
        patch.setattr(store, "write", down)
        patch.setattr(store, "send", Down())
        with pytest.raises(PlanError) as caught:
            Growing(one.root).make(lambda: down.num_calls == 1)
    assert caught.value.code == "E-STORE"
    assert files_of(URL) == {}


def test_a_writer_that_fails_while_a_file_is_sent_commits_nothing(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = machines
    growing = Growing(one.root)

    def fail() -> None:
        with counted(monkeypatch) as requests, output_lock(one.root / "data"), growing.sending():
            next(growing.grow())
            wait_for(lambda: requests["write"] == 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert files_of(URL) == {}
    assert one.bucket.sent == {}


class Down:
    """A function of a store that does not answer."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, *_: Any) -> None:
        self.num_calls += 1
        raise PlanError("the store is down", where=URL, code="E-STORE")
