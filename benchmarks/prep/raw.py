"""The reference: parse and tokenise on one core, and keep nothing."""

from __future__ import annotations

import json
import sys

import tiktoken


def main() -> None:
    """Tokenise the file named on the command line."""
    encode = tiktoken.get_encoding("o200k_harmony").encode_ordinary
    num_tokens = 0
    with open(sys.argv[1], encoding="utf-8") as file:
        for line in file:
            num_tokens += len(encode(json.loads(line)["text"]))
    print(num_tokens)


if __name__ == "__main__":
    main()
