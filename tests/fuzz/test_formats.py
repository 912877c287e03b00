"""Changed files of every format: one typed error, or the right result, in bounded memory."""

from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("sentencepiece")
families = pytest.importorskip("tests.fuzz.families")
driver = pytest.importorskip("tests.fuzz.driver")
CORPUS = Path(__file__).with_name("corpus")
FEW = 40


@pytest.mark.parametrize("name", families.FAMILIES)
def test_changed_files_are_refused_or_read_right(name: str) -> None:
    with driver.fuzzer(families.FAMILIES[name]) as fuzz:
        for kept in sorted((CORPUS / name.replace(" ", "_")).glob("*/*")):
            file = next(n for n in fuzz.family.names if n.endswith(kept.name))
            found = fuzz.outcome(file, kept.read_bytes())
            assert found in ("refused", "right"), f"{kept}: {found}"
        tried = fuzz.run(0, FEW)
    assert tried.findings == []
    assert tried.counts["refused"] + tried.counts["right"] == FEW


# These families read their file in the test itself.
_NOT_FILES = ("document id", "http reply", "selection")


@pytest.mark.parametrize("name", [name for name in families.FAMILIES if name not in _NOT_FILES])
def test_pipes_and_devices_in_place_of_files_are_refused(name: str) -> None:
    with driver.fuzzer(families.FAMILIES[name]) as fuzz:
        one_per_ending = {Path(file).suffix: file for file in fuzz.family.names}
        found = {
            (file, kind): fuzz.outcome_of_special(file, kind)
            for file in one_per_ending.values()
            for kind in ("fifo", "/dev/zero", "/proc/self/environ")
        }
    # Commands print an OSError as one line too.
    good = ("refused", "right", "untyped: OSError: ")
    assert {case: one for case, one in found.items() if not one.startswith(good)} == {}


def test_the_driver_finds_a_reader_that_believes_raises_or_takes_too_much(tmp_path: Path) -> None:
    """Otherwise its silence would say nothing."""

    def greedy(root: Path) -> object:
        return len(b"x" * (200 * 2**20 * ((root / "a").read_bytes() != b"abc"))) * 0

    readers = {
        "wrong": lambda root: (root / "a").read_bytes(),
        "untyped": lambda root: {"abc": 1}[(root / "a").read_text("latin-1")],
        "over bounds": greedy,
    }
    for expected, read in readers.items():
        fuzz = driver.Fuzzer(driver.Family({"a": b"abc"}, ("a",), read), tmp_path / expected)
        assert fuzz.outcome("a", b"abd").split(":")[0] == expected
        assert fuzz.outcome("a", b"abc") == "right"
