"""One contender in a process of its own, driven over standard input.

    python -m benchmarks.loader.worker NAME DIRECTORY SEQ_LEN BATCH_SIZE

Prints a JSON line once the first batch is there; then for each line `SECONDS` it reads for
that long and prints another. Standard output of the contender itself goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    """Serve one contender until standard input ends."""
    from benchmarks.loader.contenders import CONTENDERS
    from benchmarks.loader.own import timed

    name, directory, seq_len, batch_size = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr
    cpu, wall = time.process_time(), time.perf_counter()
    batches = CONTENDERS[name](Path(directory), int(seq_len), int(batch_size))
    next(batches)
    ready = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        tokens, cpu_s, wall_s = timed(batches, float(line))
        answer = {"tokens": tokens, "cpu_s": cpu_s, "wall_s": wall_s}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
