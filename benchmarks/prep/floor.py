"""The floor of prep: parse, tokenise, hash text and tokens, write the tokens; nothing else.

As many processes as prep has workers share the file by its bytes: two at once take more cpu time
than one after the other does.
"""

import hashlib
import multiprocessing
import sys
from itertools import pairwise
from pathlib import Path

import orjson

from nmoe_core.text.engines import EncodeBytes, load_engine
from nmoe_core.text.reference import TiktokenReference

BLOCK_BYTES = 1 << 21


def main() -> None:
    """Do so with the file, the engine, the output and the processes that the command line names."""
    path, engine, out, count = sys.argv[1:]
    reference = TiktokenReference("o200k_harmony")
    encode = None if engine == "reference" else load_engine(engine, reference).encode
    size_bytes, context = Path(path).stat().st_size, multiprocessing.get_context("fork")
    ends = [size_bytes * i // int(count) for i in range(int(count) + 1)]
    processes = [
        context.Process(target=_convert, args=(path, part, f"{out}.{i}", reference, encode))
        for i, part in enumerate(pairwise(ends))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


def _convert(
    path: str,
    part: tuple[int, int],
    out: str,
    reference: TiktokenReference,
    encode: EncodeBytes | None,
) -> None:
    """Do so with the lines that begin between two bytes of the file."""
    digest = hashlib.sha256()
    with open(path, "rb") as lines, open(out, "wb") as tokens:
        lines.seek(max(part[0] - 1, 0))
        if part[0]:
            lines.readline()
        while (left := part[1] - lines.tell()) > 0:
            block = lines.readlines(min(BLOCK_BYTES, left))
            texts = [orjson.loads(line)["text"] for line in block]
            payloads = [text.encode() for text in texts]
            ids = (reference.encode(texts) if encode is None else encode(payloads)).ids
            for payload in payloads:
                hashlib.sha256(payload).digest()
            digest.update(ids.data)
            tokens.write(ids.data)
    print(digest.hexdigest())


if __name__ == "__main__":
    main()
