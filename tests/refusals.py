"""What a refusal looks like: one error with a code; of a command, one line and exit status 1."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from loader.errors import NmoeError
from nmoe_core.cli import main


@contextmanager
def refused(
    code: str, match: str | None = None, *, naming: Iterable[str] = ()
) -> Iterator[pytest.ExceptionInfo[NmoeError]]:
    """The block must raise an NmoeError of this code, whose text matches and names all of these."""
    with pytest.raises(NmoeError, match=match) as caught:
        yield caught
    assert caught.value.code == code
    assert all(text in str(caught.value) for text in naming)


def refused_line(capsys: pytest.CaptureFixture[str], *argv: str, code: str = "E-") -> str:
    """The line that a command refuses with, whose code begins with `code`."""
    capsys.readouterr()
    assert main(argv) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ERROR [{code}")
    return line
