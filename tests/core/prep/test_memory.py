"""Peak memory of prep, measured in processes of its own: it follows neither input nor document."""

import json
import random
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from nmoe_core.text.tokenizer import load_tokenizer
from tests.project import json_lines, output_of

# The peaks of this process and of the largest of its workers, in bytes. The first is not asked of
# `getrusage`, which begins with the peak of the process that started this one.
RUN = """
import json, resource, sys
from pathlib import Path
from nmoe_core.base.compute.tables import ComputeTable
from nmoe_core.prep.run import PrepSettings, prep_shards
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.records import Reading, Split

path, workers, max_doc_tokens = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
source = JsonlSource(Reading("web"), find_files([path.name], path.parent))
settings = PrepSettings(
    name="web", num_shards=8, compute=ComputeTable(workers=workers), max_doc_tokens=max_doc_tokens
)
report = prep_shards(Split(source), settings, Path(sys.argv[4]))
status = Path("/proc/self/status").read_text()
peaks = [1024 * int(status.split("VmHWM:")[1].split()[0])]
peaks.append(1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
print(json.dumps([max(peaks), report.num_tokens, report.num_text_bytes]))
"""
MB = 10**6


class Run(NamedTuple):
    """What one run took."""

    peak_bytes: int
    num_tokens: int
    num_text_bytes: int


def _prep(path: Path, workers: int = 2, max_doc_tokens: int = 1_000_000) -> Run:
    arguments = [str(path), str(workers), str(max_doc_tokens), str(path.with_suffix(".out"))]
    return Run(*json.loads(output_of(sys.executable, "-c", RUN, *arguments)))


def _words(rng: random.Random, num_bytes: int) -> str:
    words = [f"{a}{b}" for a in ("to", "sha", "mo", "da", "lo") for b in ("ken", "rd", "del", "ta")]
    return " ".join(rng.choices(words, k=num_bytes // 6))


def _write(path: Path, num_mb: int) -> Path:
    rng = random.Random(num_mb)
    parts = [_words(rng, 2000) for _ in range(1000)]
    with open(path, "w", encoding="utf-8") as file:
        for i in range(num_mb * MB // 2000):
            file.write(f'{{"text": "{i} {parts[i % 1000]}"}}\n')
    return path


@pytest.mark.slow
def test_memory_does_not_follow_the_input_which_is_twenty_times_its_bound(tmp_path: Path) -> None:
    small, large = (_prep(_write(tmp_path / f"{mb}.jsonl", mb)) for mb in (50, 1000))
    assert large.num_text_bytes > 950 * MB
    assert large.peak_bytes < 300 * MB
    assert large.peak_bytes - small.peak_bytes < 50 * MB


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_document_of_100_mb_takes_three_times_its_text_and_no_more(
    tmp_path: Path, workers: int
) -> None:
    small = _prep(_write(tmp_path / "small.jsonl", 10), workers)
    path = tmp_path / "large.jsonl"
    text = _words(random.Random(1), 120 * MB)
    assert len(text) > 100 * MB
    path.write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
    whole = _prep(path, workers, 10**9)
    assert whole.num_text_bytes == len(text)
    tokens_bytes = 4 * whole.num_tokens
    # The mapped line, the parser's copy and the text; then the ids, and once more to hand them on.
    assert whole.peak_bytes < small.peak_bytes + 3.2 * len(text) + 2 * tokens_bytes
    cut = _prep(path, workers)
    assert cut.num_tokens == 1_000_001
    assert cut.peak_bytes < small.peak_bytes + 3.2 * len(text)


@pytest.mark.parametrize(("sampled_bytes", "is_shared"), [(100, True), (10**9, False)])
def test_workers_of_a_large_source_share_the_reference_of_the_tokenizer(
    tmp_path: Path, sampled_bytes: int, is_shared: bool
) -> None:
    """Each would load its own for its first comparison, long after the start."""
    load_tokenizer("o200k_harmony")  # what is known of it is kept: it is not loaded for that
    (tmp_path / "in.jsonl").write_text(json_lines({"text": f"text {i} " * 20} for i in range(50)))
    code = f"""
import os, sys
from nmoe_core import JSONLSource, PrepConfig, PrepPipeline
from nmoe_core.prep import run
run.SAMPLED_BYTES, fork = {sampled_bytes}, os.fork
os.fork = lambda: fork() if print("tiktoken" in sys.modules) is None else 0
config = PrepConfig(output_dir="out", dataset_name="web", num_workers=2)
PrepPipeline(JSONLSource("in.jsonl"), config).run()
"""
    said = output_of(sys.executable, "-c", code, cwd=tmp_path)
    assert set(said.split()) == {str(is_shared)}
