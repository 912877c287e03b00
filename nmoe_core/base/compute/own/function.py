"""Calls a function of the user's own in its process, and refuses what is no function of one
document."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, TypeVar

from nmoe_core.base.compute.limited import LimitedProcess
from nmoe_core.base.compute.own.code import Code
from nmoe_core.base.errors import FunctionError

MAX_BATCH_CHARS = 2**18
_NUM_SAMPLED = 4
# Variables that Python and libraries of numbers need. Others, such as keys of servers, would be
# inputs that nothing records.
_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")
_VARIABLES += ("LC_", "LD_", "PYTHON", "CUDA_", "NVIDIA_", "XDG_CACHE", "NMOE_CACHE", "TIKTOKEN_")
_FIXED = {
    "PYTHONHASHSEED": "0",  # sets have the same order in each process
    "OMP_NUM_THREADS": "1",  # sums have the same order on each machine
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
Row = TypeVar("Row")
Parse = Callable[[Any, Sequence[str]], list[Row]]
"""From what a function returned for texts to one row for each. Raises ValueError if it cannot."""


class Function(NamedTuple):
    """A function and its limits."""

    name: str
    """`package.module:function`."""
    code: Code
    model: str | None
    settings: str
    """As JSON."""
    max_seconds: float
    memory_bytes: int


class Documents(NamedTuple):
    """Documents that a function gets together."""

    texts: Sequence[str]
    ids: Sequence[str]
    """Names of the documents in errors."""
    sources: Sequence[str]
    columns: Mapping[str, Sequence[Any]]

    def part(self, start: int, stop: int) -> "Documents":
        """Some of the documents."""
        some = slice(start, stop)
        columns = {name: values[some] for name, values in self.columns.items()}
        return Documents(self.texts[some], self.ids[some], self.sources[some], columns)

    def batches(self) -> Iterator["Documents"]:
        """The documents in parts of at most `MAX_BATCH_CHARS`; a longer document is alone."""
        start = 0
        num_chars = 0
        for i, text in enumerate(self.texts):
            if i > start and num_chars + len(text) > MAX_BATCH_CHARS:
                yield self.part(start, i)
                start = i
                num_chars = 0
            num_chars += len(text)
        if start < len(self.texts):
            yield self.part(start, len(self.texts))


class OwnFunction:
    """A function, whose process starts at the first call and ends with this object.

    Attributes:
        is_checked: Whether some documents were given alone, to see that their rows are the same.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._process: LimitedProcess | None = None
        self.is_checked = False

    def rows(self, documents: Documents, parse: Parse[Row]) -> list[Row]:
        """The row of each document.

        Raises:
            FunctionError: The function cannot be imported (E-FUNCTION-IMPORT), raised
                (E-FUNCTION-RAISED), returned what `parse` refuses (E-FUNCTION-RETURN), exceeded a
                limit (E-FUNCTION-LIMIT), ended its process (E-FUNCTION-LOST), or returned another
                row for a document alone than among others (E-FUNCTION-BATCH).
        """
        found: list[Row] = []
        for batch in documents.batches():
            try:
                rows = self._rows(batch, parse)
            except FunctionError as error:
                self._raise_first(batch, parse, error)
            if not self.is_checked:
                self._require_same(batch, rows, parse)
                self.is_checked = True
            found += rows
        return found

    def _rows(self, batch: Documents, parse: Parse[Row]) -> list[Row]:
        where = _where(batch)
        values = [batch.texts, batch.sources, batch.columns]
        answer = self._ask(values, where)
        try:
            return parse(answer["returned"], batch.texts)
        except (ValueError, TypeError, LookupError) as error:
            raise self._error(
                "did not return what it must",
                "E-FUNCTION-RETURN",
                where,
                found=str(error),
                do="correct the function, or what the configuration says of it",
            ) from None

    def _raise_first(self, batch: Documents, parse: Parse[Row], error: FunctionError) -> NoReturn:
        """Raise the error of the first document that fails alone, or else of the whole batch."""
        is_of_code = error.code == "E-FUNCTION-IMPORT"
        deadline = time.monotonic() + self._function.max_seconds
        for i in range(0 if is_of_code or len(batch.texts) == 1 else len(batch.texts)):
            if time.monotonic() > deadline:
                break
            self._rows(batch.part(i, i + 1), parse)
        raise error

    def _require_same(self, batch: Documents, rows: list[Row], parse: Parse[Row]) -> None:
        """Raise FunctionError if some documents have another row alone (E-FUNCTION-BATCH)."""
        for i in range(0, len(rows), max(1, -(-len(rows) // _NUM_SAMPLED))):
            one = batch.part(i, i + 1)
            (row,) = self._rows(one, parse)
            if row != rows[i]:
                raise self._error(
                    "returned another result for a document alone than among others",
                    "E-FUNCTION-BATCH",
                    _where(one),
                    found=f"{row} alone, {rows[i]} in a batch of {len(rows)}",
                    do="let the result depend on the document alone: no random numbers, no clock, "
                    "no state, and models that get one document at a time",
                )

    def _ask(self, values: Any, where: str) -> dict[str, Any]:
        if self._process is None:
            kept = {k: v for k, v in os.environ.items() if k.startswith(_VARIABLES)}
            module = "nmoe_core.base.compute.own.process"
            self._process = LimitedProcess(module, kept | _FIXED)
            asked = self._function._asdict()
            asked["settings"] = json.loads(self._function.settings)
            self._answer(asked, self._function.code.directory or "import", is_import=True)
        return self._answer(values, where)

    def _answer(self, message: Any, where: str, *, is_import: bool = False) -> dict[str, Any]:
        """The answer of the process. A process that does not answer, or cannot import the function,
        is ended."""
        process = self._process
        assert process is not None
        started = time.monotonic()
        payload = process.ask([json.dumps(message).encode()], self._function.max_seconds)
        answer: Any = None
        with suppress(ValueError):
            answer = json.loads(payload)
        is_answer = isinstance(answer, dict)
        if not is_answer or (is_import and "failed" in answer):
            process.close()
            self._process = None
        if not is_answer:
            self._refuse_silence(where, time.monotonic() - started, process.process.returncode)
        if "failed" in answer:
            self._refuse_failure(
                answer, where, "E-FUNCTION-IMPORT" if is_import else "E-FUNCTION-RAISED"
            )
        if (path := answer["outside"]) is not None:
            raise self._error(
                "imported a module of its directory that is not part of its code",
                "E-FUNCTION-IMPORT",
                path,
                do="move the module into the package of the function, or, if the function is in a "
                "plain module, beside it",
            )
        return answer

    def _refuse_silence(self, where: str, seconds: float, status: int) -> NoReturn:
        limit_s = self._function.max_seconds
        if seconds >= limit_s:
            do = "make the function faster, or raise max_seconds"
            expected = f"at most {limit_s:g} s"
            raise self._error(
                "exceeded its limit of time", "E-FUNCTION-LIMIT", where, expected=expected, do=do
            )
        ended = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        do = "correct the function; if memory may have run out, raise memory_gib"
        raise self._error("ended its process", "E-FUNCTION-LOST", where, found=ended, do=do)

    def _refuse_failure(self, answer: Any, where: str, code: str) -> NoReturn:
        failed = answer["failed"]
        if failed is None:
            do = "use less memory, or raise memory_gib"
            expected = f"at most {self._function.memory_bytes / 2**30:g} GiB"
            raise self._error(
                "exceeded its limit of memory", "E-FUNCTION-LIMIT", where, expected=expected, do=do
            )
        did = f"raised {failed}"
        found = answer["message"]
        if code == "E-FUNCTION-IMPORT":
            did = "cannot be imported"
            found = f"{failed}: {found}"
        raise self._error(did, code, where, found=found, do="correct the function")

    def _error(self, did: str, code: str, where: str, **more: str) -> FunctionError:
        what = f"the function {self._function.name} {did}"
        return FunctionError(what, where=where, code=code, **more)


def _where(batch: Documents) -> str:
    more = f" and {len(batch.ids) - 1} more documents" if len(batch.ids) > 1 else ""
    return batch.ids[0] + more
