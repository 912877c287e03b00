"""The floor of growth on one core: read and hash the source; read, hash, write, hash the shards."""

import hashlib
import sys
from pathlib import Path


def main() -> None:
    """Do so with the file and the shards that the command line names."""
    source, shards = map(Path, sys.argv[1:])
    target = source.with_name("floor.bin")
    print(hashlib.sha256(source.read_bytes()).hexdigest())
    for path in sorted(path for path in shards.rglob("*") if path.is_file()):
        payload = path.read_bytes()
        before = hashlib.sha256(payload).digest()
        target.write_bytes(payload)
        assert hashlib.sha256(payload).digest() == before


if __name__ == "__main__":
    main()
