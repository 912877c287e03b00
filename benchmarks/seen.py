"""`python -m benchmarks.seen`: `nmoe seen` on 100 million tokens against a scan of them.

Words and pairs of words are as frequent as in the real documents found on this machine (and those
of `--text DIR`), and yet no passage repeats: each token is followed by one that follows it at some
place, drawn anew, in these documents. Sentences are cut out of the result, half with two words
exchanged. Both sides read memory that is already there; each place is that of a scan for the bytes
of the decoded text, for the first `--scans` of the sentences. Processor milliseconds leave out what
other processes of the machine do.
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
from nmoe_core.audit.seen.index_files import Part
from nmoe_core.audit.seen.search import Sentence
from nmoe_core.audit.seen.spellings import Spellings
from nmoe_core.cli.output import print_table
from nmoe_core.shards.suffixes import suffix_array
from nmoe_core.text.tokenizer import Tokenizer, load_tokenizer

_WORDS, _CUT = (4, 25), 200
_CHAINS = 2**18


def main() -> None:
    """Print the time of the index, and of each query by both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--queries", type=int, default=2000)
    parser.add_argument("--scans", type=int, default=100)
    parser.add_argument("--text", type=Path, help="directory of JSON lines to read too")
    options = parser.parse_args()
    tokenizer, rng = load_tokenizer("o200k_harmony"), np.random.default_rng(0)
    tokens = _tokens(tokenizer, options.tokens, options.text, rng)
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
    found, spent, scanned, places = [], [], [], 0
    texts = [_sentence(tokenizer, tokens, rng, n % 2 == 1) for n in range(options.queries)]
    for number, text in enumerate(map(str.encode, texts)):
        started, busy = time.perf_counter(), time.process_time()
        hits = Sentence(spellings, text).find(part)
        found.append(time.perf_counter() - started)
        spent.append(time.process_time() - busy)
        places += len(hits)
        if number < options.scans:
            started = time.perf_counter()
            expected = _scan(payload, text)
            scanned.append(time.perf_counter() - started)
            if len(hits) != expected:
                raise AssertionError(f"{text!r}: {len(hits)} places, {expected} by the scan")
    sides = {"index": found, "index, processor": spent, "scan of the text": scanned}
    rows = [
        [name, *(f"{1000 * q:.2f}" for q in np.quantile(times, [0.5, 0.99, 1]))]
        for name, times in sides.items()
    ]
    print_table(["ms per query", "median", "99 %", "most"], rows)
    print(f"{len(tokens):,} tokens, {options.queries} queries, {places:,} places")
    print(f"index: {indexed:.1f} s and 4 bytes per token; vocabulary, once: {spelled:.2f} s")
    print("the longest, in processor ms:")
    for number in np.argsort(spent)[::-1][:5].tolist():
        print(f"{1000 * spent[number]:8.2f}  {texts[number][:80]!r}")


def _tokens(
    tokenizer: Tokenizer, count: int, directory: Path | None, rng: np.random.Generator
) -> np.ndarray:
    """Tokens that follow one another as in real documents."""
    path = Path(f"build/bench/seen-{count}.jsonl")
    write_corpus(path, 4 * count, directory)
    texts = [orjson.loads(line)["text"] for line in path.read_bytes().splitlines()]
    rows = chain.from_iterable((*row, tokenizer.eos_token_id) for row in tokenizer.rows(texts))
    real = np.fromiter(rows, np.uint32)
    print(f"{len(texts):,} documents, {len(real):,} tokens of their own", flush=True)
    order = np.argsort(real, kind="stable")
    first = np.searchsorted(real[order], np.arange(int(real.max()) + 2))
    at = rng.integers(0, len(real), _CHAINS)
    drawn = np.empty((_CHAINS, count // _CHAINS + 1), np.uint32)
    for column in drawn.T:
        column[:] = ids = real[at]
        places = rng.integers(first[ids], first[ids + 1])
        at = (order[places] + 1) % len(real)
    tokens = drawn.reshape(-1)[:count].copy()
    tokens[-1] = tokenizer.eos_token_id
    return tokens


def _scan(payload: bytes, text: bytes) -> int:
    count, at = 0, payload.find(text)
    while at >= 0:
        count, at = count + 1, payload.find(text, at + 1)
    return count


def _sentence(
    tokenizer: Tokenizer, tokens: np.ndarray, rng: np.random.Generator, exchange: bool
) -> str:
    while True:
        at, length = int(rng.integers(0, len(tokens) - _CUT)), int(rng.integers(*_WORDS))
        row = tokens[at : at + _CUT]
        words = tokenizer.decode(row[: np.argmax(row == tokenizer.eos_token_id) or _CUT]).split(" ")
        chosen = words[1 : 1 + length]
        if len(words) > length + 2 and not any("\ufffd" in word for word in chosen):
            if exchange:
                chosen[0], chosen[-1] = chosen[-1], chosen[0]
            if len(text := " ".join(chosen).strip()) >= 8:
                return text


if __name__ == "__main__":
    main()
