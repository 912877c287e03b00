"""Web archives and HTML files: main texts, other records counted, damage named by its place."""

import bz2
import gzip
import re
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe_core.base.errors import ConfigError, SourceError
from nmoe_core.base.strict import validate
from nmoe_core.sources.records import WARC_FIELDS, BadRecord, Source
from nmoe_core.sources.spec import SourceSpec
from nmoe_core.sources.web import pages
from tests.core.sources.archives import MENU, archive, conversion, page, response, text_of
from tests.core.sources.read import good, opened, records, texts
from tests.refusals import refused

URL = "https://www.Example.org/a/{}"
PAGES = [response(URL.format(i), page(i)) for i in range(30)]
PACKS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
}


def _source(directory: Path, payload: bytes, name: str = "a.warc", **keys: Any) -> Source:
    (directory / name).write_bytes(payload)
    kind = "wet" if ".wet" in name else "warc"
    return opened(directory, kind=kind, paths=[name], **keys).source


def _left_out(source: Source) -> Counter[str]:
    found = [one for one in records(source) if isinstance(one, BadRecord)]
    return Counter(one.reason for one in found if one.is_skipped)


def _bad(source: Source) -> list[str]:
    found = [one for one in records(source) if isinstance(one, BadRecord)]
    return [one.reason for one in found if not one.is_skipped]


@pytest.mark.parametrize("suffix", [*PACKS, ".members"])
def test_the_pages_of_an_archive_are_its_documents_in_every_container(
    tmp_path: Path, suffix: str
) -> None:
    is_cut = suffix == ".members"  # one gzip member per record, as crawlers write it
    payload = archive(PAGES, gzip=is_cut)
    payload = payload if is_cut else PACKS[suffix](payload)
    source = _source(tmp_path, payload, f"a.warc{'.gz' if is_cut else suffix}")
    assert texts(source) == [text_of(i) for i in range(30)]
    assert _left_out(source) == {"warcinfo records": 1}
    assert source.num_rows() == 31


def test_ids_are_those_of_records_and_stay_if_the_file_is_packed_and_moved(tmp_path: Path) -> None:
    payload = archive(PAGES)
    found = good(_source(tmp_path, payload))
    assert all(one.id.startswith("urn:uuid:") for one in found)
    moved = good(_source(tmp_path, gzip.compress(payload), "other.warc.gz"))
    assert [one.id for one in moved] == [one.id for one in found]
    without = re.sub(rb"WARC-Record-ID: \S+\r\n", b"", payload)
    first = good(_source(tmp_path, without))[0]
    assert first.id == f"web/a.warc:{without.index(b'WARC/1.0', 9)}"


def test_fields_of_records_are_kept_as_columns(tmp_path: Path) -> None:
    source = _source(tmp_path, archive(PAGES[:1]), columns=WARC_FIELDS)
    [record] = good(source)
    fields = dict(zip(WARC_FIELDS, record.kept))
    assert fields["url"] == "https://www.Example.org/a/0"
    assert fields["domain"] == "www.example.org"
    assert fields["content_type"] == "text/html"
    assert fields["record_id"] == record.id
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", fields["warc_date"])
    (block,) = source.blocks()
    assert block.kept([record]).rows.column_names == [*WARC_FIELDS]


def test_a_wet_file_gives_its_texts_and_its_bytes_must_be_utf8(tmp_path: Path) -> None:
    written = [conversion(URL.format(i), f"Text {i} über".encode()) for i in range(3)]
    payload = archive([*written, conversion("http://a/", b"caf\xe9"), *PAGES[:2]], gzip=True)
    source = _source(tmp_path, payload, "a.warc.wet.gz", columns=("url",))
    assert texts(source) == ["Text 0 über", "Text 1 über", "Text 2 über"]
    assert [one.kept for one in good(source)] == [(URL.format(i),) for i in range(3)]
    assert _bad(source) == ["not UTF-8 at byte 3, perhaps Windows-1252"]
    assert _left_out(source) == {"response records": 2, "warcinfo records": 1}


def test_every_record_is_a_document_or_is_counted_by_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    html = [("Content-Type", "text/html; charset=utf-8")]
    robots = '<meta name="ROBOTS" content="nofollow, NOINDEX">'
    limit = 200_000
    monkeypatch.setattr("nmoe_core.sources.web.warc.MAX_PAGE_BYTES", limit)
    odd = {
        "responses whose HTTP status is not 200": response("http://a/", page(1), status="404 No"),
        "responses that are not HTML": response(
            "http://a/", b"{}", headers=[("Content-Type", "application/json")]
        ),
        "pages that ask robots not to index them": response("http://a/", page(2, robots)),
        "pages with bytes that are not of their encoding": response(
            "http://a/", b"<p>caf\xe9", headers=html
        ),
        "responses whose HTTP body cannot be decoded": response(
            "http://a/", page(3), headers=[*html, ("Content-Encoding", "gzip")]
        ),
        "pages whose elements are nested more than 256 deep": response(
            "http://a/", b"<div>" * 5000, headers=html
        ),
        "records of more than 16 MiB": response("http://a/", b"<p>" * limit, headers=html),
    }
    again = response("http://a/", page(4), headers=[*html, ("X-Robots-Tag", "noindex")])
    bomb = gzip.compress(b"<p>" + b"a" * limit)
    large = response("http://a/", bomb, headers=[*html, ("Content-Encoding", "gzip")])
    source = _source(tmp_path, archive([*odd.values(), again, large, *PAGES]))
    twice = Counter(
        {"pages that ask robots not to index them": 1, "records of more than 16 MiB": 1}
    )
    assert _left_out(source) == Counter([*odd, "warcinfo records"]) + twice
    assert _bad(source) == []
    assert len(good(source)) + _left_out(source).total() == source.num_rows() == 40


def test_the_body_of_a_response_is_decoded_as_its_headers_say(tmp_path: Path) -> None:
    html = ("Content-Type", "text/html")
    packed = response(
        "http://a/", gzip.compress(page(1)), headers=[html, ("Content-Encoding", "gzip")]
    )
    body = page(2)
    in_chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    chunked = response("http://a/", in_chunks, headers=[html, ("Transfer-Encoding", "chunked")])
    assert texts(_source(tmp_path, archive([packed, chunked]))) == [text_of(1), text_of(2)]


def _cases() -> dict[str, tuple[bytes, str]]:
    whole = archive(PAGES[:3])
    second = whole.index(b"WARC/1.0", 9)
    size = re.search(rb"Content-Length: (\d+)", whole[second:])
    assert size is not None
    length = size[1]

    def with_length(new: bytes) -> bytes:
        old = b"Content-Length: " + length
        head, tail = whole[:second], whole[second:]
        return head + tail.replace(old, b"Content-Length: " + new, 1)

    at = f"byte {second}"
    return {
        "too long": (with_length(str(int(length) + 7).encode()), at),
        "too short": (with_length(str(int(length) - 7).encode()), at),
        "huge": (with_length(b"9" * 17), at),
        "negative": (with_length(b"-5"), at),
        "no number": (with_length(b"many"), at),
        "twice": (with_length(length + b"\r\nContent-Length: 3"), at),
        "cut in a body": (whole[:-200], "byte"),
        "cut in a header": (whole[: second + 30], at),
        "cut at the end": (whole[:-2], "byte"),
        "other bytes": (whole[:second] + b"<html>" + whole[second:], at),
        "not an archive": (page(1), "byte 0"),
        "null bytes": (b"\0" * 1000, "byte 0"),
        "endless header": (b"WARC/1.0\r\n" + b"A: b\r\n" * 100_000, "byte 0"),
        "endless line": (b"WARC/1.0\r\n" + b"A" * 1_000_000, "byte 0"),
    }


@pytest.mark.parametrize("name", _cases())
def test_a_damaged_archive_is_an_error_that_names_file_and_byte(tmp_path: Path, name: str) -> None:
    payload, place = _cases()[name]
    with refused("E-SOURCE-TORN", naming=["a.warc", place]):
        records(_source(tmp_path, payload))
    with refused("E-SOURCE-TORN", naming=["a.warc.gz", place]):
        records(_source(tmp_path, gzip.compress(payload), "a.warc.gz"))


def test_a_torn_container_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    for suffix in (".gz", ".zst", ".bz2"):
        payload = PACKS[suffix](archive(PAGES))
        with refused("E-SOURCE-TORN", f"a.warc{suffix}"):
            records(_source(tmp_path, payload[:-20], f"a.warc{suffix}"))


def test_a_record_that_is_left_out_takes_no_memory(tmp_path: Path) -> None:
    """A small file may unpack to a record of any size."""
    large = response("http://a/", bytes(40 * 2**20))
    source = _source(tmp_path, gzip.compress(archive([large, *PAGES[:1]])), "a.warc.gz")
    tracemalloc.start()
    assert texts(source) == [text_of(0)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert _left_out(source)["records of more than 16 MiB"] == 1
    assert peak < 20 * 2**20


def test_reading_starts_at_any_block_and_gives_the_same_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.sources.web.warc.BLOCK_BYTES", 2000)
    for name, packed in (("a.warc", False), ("a.warc.gz", True)):
        source = _source(tmp_path, archive(PAGES, gzip=packed), name)
        whole = records(source)
        blocks = list(source.blocks())
        assert len(blocks) > 5
        for block, after in pairwise(blocks):
            assert block.end == after.start
            assert records(source, block.end) == [r for r in whole if r.row >= block.end.row]
        size_bytes = source.size_bytes()
        assert sum(block.size_bytes for block in blocks) == size_bytes


@settings(max_examples=30, deadline=None)
@given(place=st.integers(0, 2000), byte=st.integers(0, 255), cut=st.booleans())
def test_any_changed_byte_is_records_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int, cut: bool
) -> None:
    payload = bytearray(archive(PAGES[:2]))
    place %= len(payload)
    payload[place] = byte
    source = _source(tmp_path_factory.getbasetemp(), bytes(payload[:place] if cut else payload))
    with suppress(SourceError):
        records(source)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"text_field": "text"}, "has no text_field"),
        ({"id_field": "url"}, "has no text_field, id_field"),
        ({"columns": ("title",)}, "no column 'title'"),
        ({"csv_delimiter": ";"}, "of kind warc does not take csv_delimiter"),
        ({"chat_template": "chatml"}, "of kind warc does not take chat_template"),
        ({"encoding": "utf-9"}, "'utf-9' is not the name of an encoding"),
        ({"encoding": "base64"}, "'base64' is not the name of an encoding"),
    ],
)
def test_a_key_that_archives_do_not_take_is_refused(keys: dict[str, Any], said: str) -> None:
    table = {"id": "web", "kind": "warc", "paths": ["a.warc"]}
    with pytest.raises(ConfigError, match=re.escape(said)):
        validate(SourceSpec, table | keys, "test")


def test_a_column_of_the_whole_mixture_that_archives_lack_is_refused(tmp_path: Path) -> None:
    spec = validate(SourceSpec, {"id": "web", "kind": "warc", "paths": ["a.warc"]}, "test")
    assert spec.with_columns(("licence",)).columns == ("licence",)
    source = _source(tmp_path, archive(PAGES[:1]))
    source.reading = source.reading._replace(kept=("licence",))
    with refused("E-SOURCE-FIELD", "licence"):
        source.check()


def _html(directory: Path, files: dict[str, bytes], **keys: Any) -> Source:
    for name, payload in files.items():
        (directory / name).write_bytes(payload)
    return opened(directory, kind="html", paths=["*.htm*"], **keys).source


def test_html_files_give_their_main_text_in_the_encoding_that_they_declare(tmp_path: Path) -> None:
    body = "<main><p>Über den Flüssen stehen viele große Bäume, und das Café ist offen.</p></main>"
    text = "Über den Flüssen stehen viele große Bäume, und das Café ist offen."

    def html(head: str) -> str:
        return f"<html><head>{head}</head><body>{MENU}{body}<footer>Imprint</footer></body></html>"

    files = {
        "a.html": html('<meta charset="utf-8">').encode(),
        "b.htm": html('<meta charset="ISO-8859-1">').encode("cp1252"),
        "c.html": html(
            '<meta http-equiv="Content-Type" content="text/html; charset=windows-1252">'
        ).encode("cp1252"),
        "d.html": html("").encode("utf-16"),
        "e.html": html("").encode("utf-8-sig"),
        "f.html": html("").encode(),
    }
    source = _html(tmp_path, files)
    assert [one.id for one in good(source)] == [f"web/{name}:0" for name in files]
    assert texts(source) == [text] * 6


def test_a_page_that_declares_no_encoding_is_read_by_that_of_the_source(tmp_path: Path) -> None:
    text = "Das große Café über den Flüssen ist heute geöffnet."
    files = {"a.html": f"<p>{text}</p>".encode("cp1252")}
    assert _bad(_html(tmp_path, files)) == ["not UTF-8 at byte 10, perhaps Windows-1252"]
    for encoding in ("cp1252", "windows-1252", "detect"):
        assert texts(_html(tmp_path, files, encoding=encoding)) == [text]
    [record] = good(_html(tmp_path, files, encoding="detect"))
    assert record.encoding == "cp1252"
    [replaced] = good(_html(tmp_path, files, on_error="replace"))
    assert replaced.is_replaced
    assert "gro\ufffde" in replaced.text


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\0" * 5000,
        b"<" * 200_000,
        b"<p>" * 100_000,
        b"<b>" * 50_000,
        b"<ul>" * 50_000,
        b"<table>" * 50_000,
        b"<!--",
        b"<script>" + b"<div>" * 200,
        b"<frameset><frame></frameset>",
        b'<meta charset="utf-16"><p>a few words of text here</p>',
        b'<meta charset="no-such-encoding"><p>a few words</p>',
        b"<p " + b"x=1 " * 100_000 + b">t",
    ],
)
def test_any_page_is_a_text_in_time_that_grows_with_it(tmp_path: Path, payload: bytes) -> None:
    assert len(texts(_html(tmp_path, {"a.html": payload}))) == 1


def test_a_list_near_the_root_of_a_page_is_text_and_a_menu_is_not(tmp_path: Path) -> None:
    """The library alone takes every list near the root for a menu."""
    items = "".join(f"<li>item {i} of a list with several words in it</li>" for i in range(5))
    body = f"{MENU}<main><article><p>{text_of(1)}</p><ul>{items}</ul></article></main>"
    [text] = texts(_html(tmp_path, {"a.html": f"<html><body>{body}</body></html>".encode()}))
    assert text.count("item") == 5
    assert "Home" not in text


def test_a_page_over_the_limit_is_a_bad_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.sources.web.html.MAX_PAGE_BYTES", 1000)
    files = {"a.html": page(1), "b.html": page(1) * 9, "c.html.gz": gzip.compress(bytes(10**7))}
    assert _bad(_html(tmp_path, files)) == ["a page of more than 1000 bytes"] * 2


def test_the_extraction_and_its_version_are_part_of_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def digest(**keys: Any) -> str:
        table = {"id": "web", "kind": "warc", "paths": ["a"]} | keys
        return validate(SourceSpec, table, "test").reading_digest("train")

    before = digest()
    assert before == digest(encoding="utf-8")
    assert before != digest(encoding="detect")
    lines = digest(kind="jsonl")
    monkeypatch.setattr(pages, "version_of", lambda package: f"{package} 99")
    assert digest() != before
    assert digest(kind="html") != digest(kind="files")
    assert digest(kind="jsonl") == lines


@pytest.mark.parametrize("module", ["fastwarc", "resiliparse"])
def test_a_missing_package_is_one_line_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    source = _source(tmp_path, archive(PAGES[:1]))
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with refused("E-SOURCE-EXTRA", r"pip install 'nmoe-data\[web\]'"):
        records(source)
    if module == "resiliparse":
        with refused("E-SOURCE-EXTRA", r"pip install 'nmoe-data\[web\]'"):
            _html(tmp_path, {"a.html": page(1)}).check()
