"""Token ids of real text are tiktoken's, for every engine.

The text is the standard library's own; `NMOE_CORPUS_DIR` names a directory whose JSON lines
(`.jsonl`, also `.gz` and `.zst`) are compared as well, all of them.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.records import Reading, Record
from nmoe_core.text.tokenizer import Engine, load_tokenizer

_NUM_FILES = 60


def _texts() -> Iterator[list[str]]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    yield [path.read_text(encoding="utf-8") for path in files[:: max(1, len(files) // _NUM_FILES)]]
    named = os.environ.get("NMOE_CORPUS_DIR")
    if named:
        files = find_files(["**/*.jsonl*"], Path(named))
        for block in JsonlSource(Reading("corpus"), files).blocks():
            yield [record.text for record in block.records() if isinstance(record, Record)]


@pytest.mark.parametrize("engines", [("quicktok", "gigatoken")])
def test_real_text_has_the_ids_of_tiktoken(engines: tuple[Engine, ...]) -> None:
    pytest.importorskip("gigatoken")
    tokenizers = [load_tokenizer(engine=engine) for engine in engines]
    encode = tiktoken.get_encoding("o200k_harmony").encode_ordinary
    num_tokens = 0
    for texts in _texts():
        expected = np.array([i for text in texts for i in encode(text)], np.uint32)
        num_tokens += len(expected)
        for tokenizer in tokenizers:
            found = tokenizer.encode_batch(texts)
            np.testing.assert_array_equal(found.ids, expected, err_msg=tokenizer.engine)
    assert num_tokens > 100_000
