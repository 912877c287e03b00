"""Unfinished files of a lost machine: the next one continues them and does no paid work twice."""

from pathlib import Path

import pytest

from loader.files.stores import store
from nmoe_core.base.append_log import AppendLog
from nmoe_core.base.atomic import writing_if
from nmoe_core.base.bucket.draft import Checkpoints, restore_tree
from nmoe_core.base.errors import LockedError
from nmoe_core.quality.calibration.graded import PartialRows, Tally
from tests.buckets import URL, Killed, Machine, counted, digests_of, killed_at, put


@pytest.fixture(autouse=True)
def _at_once(machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases expire at once, and each append is sent."""
    monkeypatch.setattr("nmoe_core.base.bucket.lease.EXPIRE_S", -3600.0)
    monkeypatch.setattr("nmoe_core.base.bucket.draft.SEND_EVERY_S", 0.0)
    monkeypatch.setattr("nmoe_core.base.bucket.draft.CHECKPOINT_EVERY_S", 0.0)


def append(path: Path, *lines: bytes) -> list[bytes]:
    """Append lines to a log; the lines that it had."""
    with AppendLog(path) as log:
        there = [line.payload for line in log.lines()]
        log.cut()
        for line in lines:
            log.append(line)
    return there


def lose(machine: Machine, monkeypatch: pytest.MonkeyPatch, *lines: bytes) -> None:
    """A machine appends lines and is lost before it commits them."""
    with killed_at(monkeypatch, 1, ("send",)), pytest.raises(Killed):
        append(machine.root / "answers" / "a.jsonl", *lines)


def test_lines_of_a_lost_machine_are_there_on_the_next(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    path = two.root / "answers" / "a.jsonl"
    append(path, b"0\n")
    lose(one, monkeypatch, b"1\n", b"2\n")
    assert append(path, b"3\n") == [b"0\n", b"1\n", b"2\n"]
    assert append(path) == [b"0\n", b"1\n", b"2\n", b"3\n"]
    assert [*store.listing(f"{URL}/.nmoe/drafts")] == []
    assert digests_of(URL).keys() == {"answers/a.jsonl"}


def test_a_machine_that_has_more_than_it_sent_keeps_it(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = machines
    lose(one, monkeypatch, b"1\n", b"2\n")
    path = Path(str(one.root / "answers" / "a.jsonl"))
    with open(path, "ab") as file:
        file.write(b"3\n")
    assert append(one.root / "answers" / "a.jsonl") == [b"1\n", b"2\n", b"3\n"]


def test_a_missing_piece_ends_the_file_before_it(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    lose(one, monkeypatch, b"1\n", b"2\n", b"3\n")
    store.remove(f"{URL}/.nmoe/drafts/answers/a.jsonl/{1:06d}-{2:016d}")
    assert append(two.root / "answers" / "a.jsonl", b"4\n") == [b"1\n"]
    assert append(one.root / "answers" / "a.jsonl") == [b"1\n", b"4\n"]


def test_a_directory_of_unfinished_files_is_restored_as_it_was_sent(
    machines: tuple[Machine, Machine],
) -> None:
    one, two = machines
    work = one.root / "data" / ".prep"
    (work / "shard").mkdir(parents=True)
    checkpoints = Checkpoints(work, work / "journal.json")
    for text in ("first", "second"):
        with open(work / "shard" / "tokens", "a") as file:
            file.write(text)
        (work / "journal.json").write_text(text)
        checkpoints.send_if_due()
    with open(work / "shard" / "tokens", "a") as file:
        file.write("not sent")
    there = two.root / "data" / ".prep"
    restore_tree(there)
    assert (there / "shard" / "tokens").read_text() == "firstsecond"
    assert (there / "journal.json").read_text() == "second"


def test_a_lost_machine_s_grading_goes_on_after_the_rows_that_were_sent(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    made_from = {"code": "1"}
    rows = [{"doc_id": "a", "source": "web", "early_exit": False, "decision": "keep"}] * 2

    def lose_after_rows() -> None:
        with PartialRows(one.root / "quality", made_from) as partial:
            partial.resume(Tally(0.0, None))
            partial.append(rows)
            monkeypatch.setattr("nmoe_core.base.bucket.draft.SEND_EVERY_S", 1e9)
            partial.append(rows)  # not sent, so its note must not be sent either
            raise Killed

    with killed_at(monkeypatch, 1, ("send",)), pytest.raises(Killed):
        lose_after_rows()
    with PartialRows(two.root / "quality", made_from) as partial:
        assert partial.resume(Tally(0.0, None)) == 2


def test_an_output_that_is_current_takes_no_lease(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = machines
    put(one.root, a=b"a")
    with counted(monkeypatch) as requests:
        with writing_if(lambda: False, one.root / "data") as is_stale:
            assert not is_stale
        assert requests.total() == 0
        with writing_if(lambda: True, one.root / "data") as is_stale:
            assert is_stale
    assert requests["write_if"]


def test_pieces_of_a_paused_writer_are_not_joined_with_those_of_the_new_one(
    machines: tuple[Machine, Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    path = Path("labels") / "a.jsonl"
    paused = AppendLog(one.root / path)
    paused.append(b"old 1\n")

    def go_on() -> None:
        with AppendLog(two.root / path) as log:
            assert [line.payload for line in log.lines()] == [b"old 1\n"]
            log.append(b"new, and longer\n")
            paused.append(b"old 2\n")
            paused.append(b"old 3\n")

    with killed_at(monkeypatch, 1, ("send",)), pytest.raises(Killed):
        go_on()
    three = Machine(tmp_path / "three", URL)
    assert append(three.root / path) == [b"old 1\n", b"new, and longer\n"]
    with pytest.raises(LockedError):
        paused.close()
