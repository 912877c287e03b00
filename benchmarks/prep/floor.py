"""The floor of prep on one core: parse, tokenise, hash text and tokens, write the tokens."""

import hashlib
import sys
from pathlib import Path

import orjson

from nmoe_core.text.engines import load_engine
from nmoe_core.text.reference import TiktokenReference

BLOCK_BYTES = 1 << 21


def main() -> None:
    """Do so with the file, the engine and the output that the command line names."""
    path, engine, out = sys.argv[1:]
    reference = TiktokenReference("o200k_harmony")
    encode = None if engine == "reference" else load_engine(engine, reference).encode
    digest = hashlib.sha256()
    with open(path, "rb") as lines, open(Path(out), "wb") as tokens:
        while block := lines.readlines(BLOCK_BYTES):
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
