"""Progress says how far a pass is, how fast, and how long it will take."""

import sys

import pytest

from nmoe_core.prep import progress as module
from nmoe_core.prep.progress import PrepProgress, progress_printer
from tests.core.prep.conftest import Web

HALF = PrepProgress(1200, 3_400_000, 6 * 10**6, 10**7, 2.0, resumed_bytes=10**6)
BEGUN = PrepProgress(1, 10, 100, None, 0.0)


def test_rate_and_time_left_count_this_runs_work_and_know_its_budget() -> None:
    assert HALF.rate == 2.5e6
    assert HALF.eta_s == pytest.approx(1.6)
    assert HALF.line() == "60 %, 1,200 documents, 3.4M tokens, 2.5 MB/s, 2 s left"
    ends_sooner = PrepProgress(10, 900, 10**6, 10**9, 1.0, max_tokens=1000)
    assert (ends_sooner.share, ends_sooner.eta_s) == (0.9, pytest.approx(1 / 9))
    assert PrepProgress(1, 1000, 400, 1000, 0.5).line().startswith("40 %, 1 documents, 1.0K tokens")
    assert PrepProgress(1, 10, 400, 1000, 0.5).eta_s == pytest.approx(0.75)
    assert PrepProgress(1, 10, 400, 1000, 400.0).eta_s == 600
    assert PrepProgress(1, 10, 400, 1000, 0.0).eta_s is None
    # A source of unknown size has neither a share nor an end.
    assert BEGUN.line() == "1 documents, 10 tokens, 0.0 MB/s"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_gets_a_bar_that_is_wiped_at_the_end_and_a_file_gets_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    for name in ("_BAR_INTERVAL_S", "_LINE_INTERVAL_S"):
        monkeypatch.setattr(module, name, 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with progress_printer("web") as show:
        for state in (HALF, BEGUN, HALF):
            show(state)
    printed = capsys.readouterr().err
    if is_terminal:
        begin, first, second, third, wiped, end = printed.split("\r")
        assert first == third == f"web [##############..........] {HALF.line()}"
        assert second == f"web [{'.' * 24}] {BEGUN.line()}".ljust(len(first))
        assert (begin, wiped, end) == ("", " " * len(first), "")
    else:
        assert printed == "".join(f"web: {state.line()}\n" for state in (HALF, BEGUN, HALF))


def test_prep_tells_progress_after_every_block_up_to_the_whole_source(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", 4096)
    seen: list[PrepProgress] = []
    report = web.shards(progress=seen.append)
    assert len(seen) > 20
    assert [p.size_bytes for p in seen] == sorted(p.size_bytes for p in seen)
    assert seen[-1].size_bytes == seen[-1].total_bytes == web.source.size_bytes()
    assert (seen[-1].documents, seen[-1].tokens) == (report.num_documents, report.num_tokens)
