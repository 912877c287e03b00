"""Plugin of pytest: names each test to a running measurement of coverage, and keeps its seconds.

Loaded by benchmarks.mutants, which reads both. It writes ./seconds.json.
"""

import json
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

_seconds: dict[str, float] = defaultdict(float)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Lines that run from here on, fixtures included, are reached by this test."""
    if measurement := coverage.Coverage.current():
        measurement.switch_context(item.nodeid)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration


def pytest_sessionfinish() -> None:
    if coverage.Coverage.current():
        Path("seconds.json").write_text(json.dumps(_seconds))
