"""Writes the report page of a run, with a data card and Croissant metadata beside it."""

from collections.abc import Mapping
from pathlib import Path

from loader.files.regular import read_file
from nmoe_core.base.atomic import replacing, write_bytes
from nmoe_core.base.errors import ConfigError
from nmoe_core.config.run import Run
from nmoe_core.report.html import Html, element, joined, page, paragraph
from nmoe_core.tasks.report import origins
from nmoe_core.tasks.report.buckets import BUCKETS
from nmoe_core.tasks.report.card import MADE_BY, croissant, data_card, totals
from nmoe_core.tasks.report.corpus import Corpus, Section
from nmoe_core.tasks.report.sections import SECTIONS

CARD_NAME = "README.md"
CROISSANT_NAME = "croissant.json"
_ORIGINS = (
    Section("state", "Not current", "prep", lambda corpus: [], origins.state),
    Section("integrity", "Integrity", "prep", Corpus.manifests, origins.integrity),
    Section("provenance", "Provenance", "prep", lambda corpus: [], origins.provenance),
)


def write_report(run: Run, path: Path, cost: origins.Cost = ()) -> list[Path]:
    """Write `path`, and `README.md` and `croissant.json` beside it; return the paths. If an input
    of a section is missing, the section has a line that says so.

    Args:
        run: The run.
        path: The page.
        cost: As `origins.cost`.

    Raises:
        ConfigError: Another `README.md` than nmoe's exists (E-REPORT-EXISTS).
    """
    corpus = Corpus.of(run)
    card = path.with_name(CARD_NAME)
    if card.exists() and MADE_BY not in read_file(card).decode("utf-8", "replace"):
        raise ConfigError(
            "nmoe did not write the README.md beside the page",
            where=card.absolute(),
            do="write the page to a separate directory, such as report/index.html",
            code="E-REPORT-EXISTS",
        )
    described = path.with_name(CROISSANT_NAME)
    with replacing(path, card, described):
        write_bytes(path, page_of(corpus, cost).encode("utf-8"))
        write_bytes(card, data_card(corpus).encode("utf-8"))
        write_bytes(described, croissant(corpus, path.parent.absolute()).encode("utf-8"))
    return [path, card, described]


def page_of(corpus: Corpus, cost: origins.Cost = ()) -> str:
    """The HTML of the page."""
    sections = [*SECTIONS, *[BUCKETS] * bool(corpus.run.config.mixture.buckets.by), *_ORIGINS]
    shown = [(one.anchor, one.title, one.content(corpus)) for one in sections]
    shown.append(("cost", "Cost", origins.cost(cost)))
    head = [element("h1", f"The corpus {corpus.name}"), _summary(totals(corpus))]
    return page(f"{corpus.name}: report", joined(head), shown)


def _summary(found: Mapping[str, int | None]) -> Html:
    kept = found["kept"]
    documents = found["documents"]
    if documents is None:
        return paragraph("No source is prepared yet.")
    words = f"{documents:,} documents of {found['sources']:,} sources are prepared. "
    if kept is None:
        words += "They are not selected yet."
    else:
        share = 100 * kept / max(documents, 1)
        words += f"{kept:,} of them ({share:.1f} %) are kept and ordered for training."
    tiles = {name: value for name, value in found.items() if value is not None}
    shown = (
        element("div", element("b", value), name, kind="tile") for name, value in tiles.items()
    )
    return joined([paragraph(words), element("div", *shown, kind="tiles")])
