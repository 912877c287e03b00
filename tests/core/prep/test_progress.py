"""Progress says how far a pass is, how fast, and how long it will take."""

import pytest

from nmoe_core.base.progress import LOGGER
from nmoe_core.prep.progress import PrepProgress, logged_progress
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


def test_a_pass_logs_its_lines_at_intervals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with caplog.at_level("INFO", LOGGER):
        say = logged_progress("prep web")
        for second, state in ((1.0, BEGUN), (5.0, HALF), (6.0, BEGUN), (10.0, BEGUN)):
            now[0] = second
            say(state)
    assert caplog.messages == [f"prep web: {HALF.line()}", f"prep web: {BEGUN.line()}"]


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
