"""What a far position and a plan's memory cost, per policy: no data, only the order of a plan.

`python -m benchmarks.loader_seek` prints CPU milliseconds to open a schedule, seek to sequence 10^9
and locate the first batch of 32, CPU nanoseconds a sequence reading on, and the memory the process
has gained by then, for 2 and for 500 sources of 10^12 tokens in all.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

from loader.order.policies import POLICIES, weight_unit
from loader.plan.mixture import quotas, weights_fixed_point
from loader.plan.records import LoaderPlan, PlanSource, PlanStage
from loader.plan.schedule import PlanSchedule

SEQ_LEN, BATCH_SIZE, FAR, READ = 2048, 32, 10**9, 65_536
WEIGHTS = {2: [0.7, 0.3], 500: [1.0 + i % 7 for i in range(500)]}


def plan_of(policy: str, num_sources: int, num_sequences: int) -> LoaderPlan:
    """A plan without data."""
    weights = WEIGHTS[num_sources]
    fixed, shares = (
        weights_fixed_point(weights, weight_unit(policy)),
        quotas(num_sequences, weights),
    )
    sources = tuple(
        PlanSource(f"s{i}", f"s{i}", "0", 10**10, weight=weight, quota_sequences=share)
        for i, (weight, share) in enumerate(zip(fixed, shares))
    )
    return LoaderPlan(
        plan_id="seek",
        tokenizer="none",
        vocab_size=1,
        eos_token_id=0,
        seq_len=SEQ_LEN,
        batch_size=BATCH_SIZE,
        seed=42,
        policy=policy,
        window_stride="seq_len",
        on_exhaust="wrap",
        stages=(PlanStage("train", "m", sources),),
    )


def measure(policy: str, num_sources: int, num_tokens: int) -> dict[str, float]:
    """Figures of one policy, in a process of its own."""
    PlanSchedule(plan_of("swrr", 2, 10**4), "train", [10**6] * 2).locate(0, 32)  # imports
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # 10^9 sequences lie in any run of 10^12 tokens scaled up; shorter runs seek to their middle.
    num_sequences = max(num_tokens // SEQ_LEN, 1)
    plan = plan_of(policy, num_sources, num_sequences)
    far = min(FAR, num_sequences // 2)
    started = time.process_time()
    schedule = PlanSchedule(plan, "train", [10**6] * num_sources)
    schedule.locate(far, far + BATCH_SIZE)
    opened = time.process_time()
    for at in range(far, far + READ, 4096):
        schedule.locate(at, at + 4096)
    read = time.process_time()
    gained = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "seek_ms": 1e3 * (opened - started),
        "ns_per_sequence": 1e9 * (read - opened) / READ,
        "gained_mb": gained / 1024,
    }


def main() -> None:
    """Print the table."""
    print(f"{'policy':16} sources      tokens  seek ms  ns/sequence  memory MB")
    for policy in POLICIES:
        for num_sources in WEIGHTS:
            for num_tokens in (10**10, 10**12, 10**13):
                arguments = [policy, str(num_sources), str(num_tokens)]
                command = [sys.executable, "-m", "benchmarks.loader_seek", *arguments]
                row = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
                print(
                    f"{policy:16} {num_sources:7} {num_tokens:11.0e} {row['seek_ms']:8.2f}"
                    f" {row['ns_per_sequence']:12.0f} {row['gained_mb']:10.1f}"
                )


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
    else:
        main()
