"""Writes a rubric with examples: documents that people corrected, with their grades.

The examples are text of the rubric file, so a new correction does not change what an oracle is
asked; only a new file does. Their special tokens are broken as those of documents are.
"""

import json
from pathlib import Path

from loader.files.regular import read_file
from nmoe_core.base.atomic import write_bytes
from nmoe_core.base.errors import LabelError
from nmoe_core.base.result import Result
from nmoe_core.config.rubric import EXAMPLES, Example, Rubric, find_rubric
from nmoe_core.config.run import Run
from nmoe_core.labels.corrections import corrected, read_corrections
from nmoe_core.labels.label_files import SCORES_NAME
from nmoe_core.labels.oracle import Record, latest, read_records, sha256_of
from nmoe_core.labels.oracles.markers import broken, pattern
from nmoe_core.labels.scores import Scale
from nmoe_core.labels.slices import LABEL_SHARDS
from nmoe_core.quality.grading.examples import text_of_label

EXCERPT_CHARS = 1_200


def write_anchored_rubric(run: Run, path: Path, count: int) -> Result:
    """Write the run's rubric to `path` with `count` corrected documents as examples. Facts: their
    ids, as `examples`.

    The documents are of train, and their text is in no label of val or test. They are sorted by
    their corrected aggregate, then by the hash of their text, and taken at equal distances from the
    lowest to the highest. If people disagree so that a grade is not whole, the document is left
    out.

    Raises LabelError if there are too few (E-LABEL-COVERAGE), and as `read_corrections`.
    """
    corrections = read_corrections(run.tree)
    scale = Scale.of(run.rubric)
    held_out = {one.get("text_sha256") for s in ("val", "test") for one in _records(run, s)}
    found: dict[str, Record] = {}
    for record in _records(run, "train"):
        one = corrected(record, corrections, scale)
        text = record.get("text_sha256")
        is_ours = "corrected" in one and record.get("rubric_hash") == run.rubric.hash
        is_whole = is_ours and all(grade == int(grade) for grade in one["scores"].values())
        if is_whole and text not in held_out and sha256_of(text_of_label(run, one)) == text:
            found.setdefault(str(text), one)
    if len(found) < count:
        raise LabelError(
            "too few corrected documents of train",
            where=run.tree.labels,
            found=len(found),
            expected=f"at least {count}",
            do="correct more (nmoe hydra review --split train), or ask for fewer examples",
            code="E-LABEL-COVERAGE",
        )
    ordered = sorted(found.items(), key=lambda item: (item[1]["aggregated"], item[0]))
    last = len(ordered) - 1
    places = [round(i * last / max(1, count - 1)) for i in range(count)]
    chosen = [ordered[place][1] for place in places]
    source = find_rubric(run.config.oracle.rubric, run.base, run.path)
    plain = read_file(source).decode().partition(EXAMPLES)[0].rstrip()
    tables = "".join(_table(run, one) for one in chosen)
    write_bytes(path, f"{plain}\n\n{EXAMPLES}\n{tables}".encode())
    Rubric.load(path)
    return Result("", {"examples": [one["doc_id"] for one in chosen]})


def _records(run: Run, split: str) -> list[Record]:
    paths = [run.tree.label_shard(s, i) / SCORES_NAME for s, i in LABEL_SHARDS if s == split]
    found = [record for path in paths if path.is_file() for record in read_records(path)]
    return list(latest(found).values())


def _table(run: Run, record: Record) -> str:
    http = run.config.oracle.http
    markers = pattern(http.special_tokens if http else ())
    example = Example(
        doc_id=record["doc_id"],
        text=broken(text_of_label(run, record), markers)[:EXCERPT_CHARS],
        scores={name: int(grade) for name, grade in record["scores"].items()},
        note=record["corrected"]["note"],
    )
    lines = ["", "[[examples]]"]
    lines += [f"{key} = {_toml(value)}" for key, value in example.model_dump().items()]
    return "\n".join(lines) + "\n"


def _toml(value: str | dict[str, int]) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {grade}" for name, grade in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
