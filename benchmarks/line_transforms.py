"""`python -m benchmarks.line_transforms`: megabytes per processor second of `lines`, `paragraphs`.

The pages are made from the documentation: paragraphs of one line each, and menus.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from pathlib import Path

from nmoe_core.cli.output import print_table
from nmoe_core.config.transforms import LinesTable, ParagraphsTable
from nmoe_core.text.normalise import normalize_batch
from nmoe_core.text.transforms.batch import Batch
from nmoe_core.text.transforms.lines.rules import LineRules
from nmoe_core.text.transforms.paragraphs import Paragraphs

_NUM_PAGES = 4000
_ROUNDS = 5
_MENU = ("Home", "About us", "News and events", "3 likes", "Read more...", "Sign in", "Contact")


def pages(count: int = _NUM_PAGES) -> Batch:
    """Pages of about 2 kB; about half of their lines are those of menus."""
    rng = random.Random(0)
    docs = Path(__file__).parents[1] / "docs"
    texts = [path.read_text("utf-8") for path in sorted(docs.glob("*.md"))]
    blocks = [block for text in texts for block in text.split("\n\n") if "|" not in block]
    blocks = [re.sub(r"\s+", " ", block) for block in blocks]
    made = []
    for _ in range(count):
        menu = rng.sample(_MENU, 5)
        made.append("\n".join([*menu[:3], *rng.choices(blocks, k=7), *menu[3:]]))
    normal, payloads = normalize_batch(made)
    return Batch(normal, payloads, [str(i) for i in range(count)], range(count))


def main() -> None:
    """Print the median of some rounds for each transform."""
    batch = pages()
    num_bytes = sum(map(len, batch.payloads))
    presets = {name: LineRules(LinesTable(kind="lines", presets=(name,))) for name in _PRESETS}
    boilerplate = LineRules(LinesTable(kind="lines", boilerplate_documents=10))
    paragraphs = Paragraphs(ParagraphsTable(kind="paragraphs"))
    work: dict[str, Callable[[Batch], object]] = {
        **{f"lines, {name}": rules.edits for name, rules in presets.items()},
        "keys of lines": boilerplate.keys,
        "keys of paragraphs": paragraphs.keys,
    }
    rows = []
    for name, run in work.items():
        run(batch)  # compiles
        rates = sorted(num_bytes / 1e6 / _processor_s(run, batch) for _ in range(_ROUNDS))
        rows.append((name, f"{rates[_ROUNDS // 2]:.0f}", f"{rates[0]:.0f} to {rates[-1]:.0f}"))
    print_table(("transform", "MB per processor second", "least to largest"), rows)


_PRESETS = ("c4", "fineweb", "refinedweb")


def _processor_s(run: Callable[[Batch], object], batch: Batch) -> float:
    started = time.process_time()
    run(batch)
    return time.process_time() - started


if __name__ == "__main__":
    main()
