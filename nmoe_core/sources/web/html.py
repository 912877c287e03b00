"""Source kind `html`: the main text of a page per file; see `pages`."""

from dataclasses import dataclass

from nmoe_core.sources.file_sources import FilesBlock, FilesSource
from nmoe_core.sources.records import BadRecord, Record
from nmoe_core.sources.storage import SourceFile
from nmoe_core.sources.web.pages import MAX_PAGE_BYTES, page_of


@dataclass(frozen=True, slots=True)
class HtmlBlock(FilesBlock):
    """Consecutive pages."""

    def record_of(self, row: int, file: SourceFile, payload: bytes) -> Record | BadRecord:
        """The main text of a page."""
        if len(payload) > MAX_PAGE_BYTES:
            return BadRecord(row, file.where, f"a page of more than {MAX_PAGE_BYTES} bytes")
        page = page_of(payload, None, self.reading, file.where)
        id_ = self.id_of(file)
        encoding = page.encoding if self.reading.detects else ""
        return Record(row, id_, page.text, page.is_replaced, encoding=encoding)


class HtmlSource(FilesSource):
    """HTML files as documents; the file name is the document id."""

    block = HtmlBlock

    def check(self) -> None:
        """Raise SourceError if the packages for pages are not installed (E-SOURCE-EXTRA)."""
        page_of(b"", None, self.reading, self.reading.source)
