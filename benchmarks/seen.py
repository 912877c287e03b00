"""`python -m benchmarks.seen`: `nmoe seen` on 100 million tokens against a scan of them.

Real documents found on this machine (and those of `--text DIR`) are cut into pieces of 20 to 400
tokens, and drawn again where they are fewer than asked for: so texts are real, and sentences stand
there more than once. Sentences are drawn from them, half with two words exchanged. Both sides read
memory that is already there; each place is that of a scan for the bytes of the decoded text.
"""

from __future__ import annotations

import argparse
import time
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson

from benchmarks.prep.corpus import write_corpus
from nmoe_core.cli.output import print_table
from nmoe_core.seen.files import Part
from nmoe_core.seen.search import Sentence
from nmoe_core.seen.spellings import Spellings
from nmoe_core.seen.suffixes import suffix_array
from nmoe_core.text.tokenizer import Tokenizer, load_tokenizer

_WORDS = (4, 25)


def main() -> None:
    """Print the time of the index, and of each query by both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--text", type=Path, help="directory of JSON lines to read too")
    options = parser.parse_args()
    tokenizer, rng = load_tokenizer("o200k_harmony"), np.random.default_rng(0)
    tokens, texts = _tokens(tokenizer, options.tokens, options.text, rng)
    started = time.process_time()
    order = suffix_array(tokens)
    indexed = time.process_time() - started
    part = Part(cast(Any, None), cast(Any, None), Path(), 0, tokens.data, order.data)
    started = time.process_time()
    ends = tokenizer.eos_token_id, tokenizer.bos_token_id
    spellings = Spellings(tokenizer.reference.spellings(), tokenizer.vocab_size, ends)
    spelled = time.process_time() - started
    some = np.array_split(tokens, 64)
    payload = b"".join(b"".join(map(spellings.of.__getitem__, ids.tolist())) for ids in some)
    found, scanned, places = [], [], 0
    for number in range(options.queries):
        text = _sentence(texts, rng, exchange=number % 2 == 1).encode()
        started = time.perf_counter()
        hits = Sentence(spellings, text).find(part)
        found.append(time.perf_counter() - started)
        started = time.perf_counter()
        expected = _scan(payload, text)
        scanned.append(time.perf_counter() - started)
        if len(hits) != expected:
            raise AssertionError(f"{text!r}: {len(hits)} places, {expected} by the scan")
        places += expected
    rows = [
        [name, *(f"{1000 * q:.2f}" for q in np.quantile(spent, [0.5, 0.99, 1]))]
        for name, spent in (("index", found), ("scan of the text", scanned))
    ]
    print_table(["ms per query", "median", "99 %", "most"], rows)
    print(f"{len(tokens):,} tokens, {options.queries} queries, {places:,} places, all as scanned")
    print(f"index: {indexed:.1f} s and 4 bytes per token; vocabulary, once: {spelled:.2f} s")


def _tokens(
    tokenizer: Tokenizer, count: int, directory: Path | None, rng: np.random.Generator
) -> tuple[np.ndarray, list[str]]:
    """Tokens of pieces of real documents, and the documents."""
    path = Path(f"build/bench/seen-{count}.jsonl")
    write_corpus(path, 4 * count, directory)
    texts = [orjson.loads(line)["text"] for line in path.read_bytes().splitlines()]
    once = np.fromiter(chain.from_iterable(tokenizer.rows(texts)), np.uint32)
    drawn, size = [once[:count]], min(len(once), count)
    print(f"{len(texts):,} documents, {len(once):,} tokens of their own", flush=True)
    while size < count:
        at, length = int(rng.integers(0, len(once) - 400)), int(rng.integers(20, 400))
        drawn.append(once[at : at + min(length, count - size)])
        size += len(drawn[-1])
    return np.concatenate(drawn), texts


def _scan(payload: bytes, text: bytes) -> int:
    count, at = 0, payload.find(text)
    while at >= 0:
        count, at = count + 1, payload.find(text, at + 1)
    return count


def _sentence(texts: list[str], rng: np.random.Generator, exchange: bool) -> str:
    while True:
        words = texts[int(rng.integers(len(texts)))].split(" ")
        length = int(rng.integers(*_WORDS))
        if len(words) > length:
            at = int(rng.integers(0, len(words) - length))
            chosen = words[at : at + length]
            if exchange:
                chosen[0], chosen[-1] = chosen[-1], chosen[0]
            if len(text := " ".join(chosen).strip()) >= 8:
                return text


if __name__ == "__main__":
    main()
