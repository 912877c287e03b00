"""Draws the pictures of the documentation from a finished run, by default the demo's.

`python docs/make_pictures.py [CONFIG]` writes docs/pictures; the README shows `account.png`.
`nmoe report --html` shows the same of any corpus.
"""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from loader.files.format import load_manifest
from loader.plan.file import load_plan
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources
from nmoe_core.quality.calibration.summary_file import read_calibration
from nmoe_core.report.plots import calibration_plot
from nmoe_core.tasks.attributes import copies_by_source, copies_picture
from nmoe_core.tasks.curate import curate_settings
from nmoe_core.tasks.prep import manifest_picture
from nmoe_core.tasks.report.account import account_picture, run_account
from nmoe_core.tasks.report.curate_pictures import order_pictures

PICTURES = Path(__file__).with_name("pictures")
_INLINE = re.compile(r"base64,([^)]+)\)")


def main() -> None:
    """Write the pictures of the run that the command line names."""
    PICTURES.mkdir(exist_ok=True)
    for name, png in _pictures(Run(sys.argv[1] if len(sys.argv) > 1 else "demo")):
        path = PICTURES / f"{name}.png"
        path.write_bytes(png)
        print(path)


def _pictures(run: Run) -> Iterator[tuple[str, bytes]]:
    names = [source.name for source in run_sources(run)]
    made = {name: load_manifest(run.tree.manifest(name)) for name in names}
    most = max(names, key=lambda name: made[name].total_documents)
    seq_len = curate_settings(run, most).seq_len
    yield "account", _first(account_picture(run, run_account(run, load_plan(run.tree.plan))))
    yield "lengths", _first(manifest_picture(run, made[most], "train"))
    yield "copies", _first(copies_picture(copies_by_source(run, names)))
    yield "thresholds", calibration_plot(read_calibration(run.tree.calibration_summary))
    yield "order", _first(order_pictures(run, most, run.config.prep.num_shards, seq_len))


def _first(markdown: str) -> bytes:
    return base64.b64decode(_INLINE.findall(markdown)[0])


if __name__ == "__main__":
    main()
