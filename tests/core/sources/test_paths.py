"""Text files: one file, one name, one document, wherever the tree lies and whatever it holds."""

import glob
import gzip
import itertools
import os
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe_core.base.errors import SourceError
from nmoe_core.base.jsonl import marked_encoding
from nmoe_core.sources.file_sources import FilesSource
from nmoe_core.sources.paths import expand_braces, find_files, sample_files
from nmoe_core.sources.records import BadRecord, Reading, Record
from nmoe_core.sources.spec import SourceSpec
from nmoe_core.sources.storage import SourceFile
from tests.core.sources.read import ANY_BYTES, opened, records
from tests.refusals import refused


def _write(base: Path, *names: str) -> None:
    for name in names:
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(name)


def _names(base: Path, *patterns: str) -> list[str]:
    return [file.name for file in find_files(patterns, base)]


def test_files_of_two_patterns_are_named_from_the_directory_they_share(tmp_path: Path) -> None:
    _write(tmp_path, "in/a/x.py", "in/b/x.py", "in/b/c/y.py")
    assert _names(tmp_path, "in/a/*.py", "in/b/**/*.py") == ["a/x.py", "b/c/y.py", "b/x.py"]
    assert _names(tmp_path, "in/{a,b}/x.py") == ["a/x.py", "b/x.py"]
    assert _names(tmp_path, "in/b/c/y.py") == ["y.py"]
    assert _names(tmp_path, "in/b/../a/*.py") == ["x.py"]
    names = _names(Path("/"), "{stdlib}/json/*.py", "{stdlib}/email/*.py")
    assert {"json/__init__.py", "email/__init__.py"} <= set(names)
    assert len(names) == len(set(names))


def test_a_directory_with_glob_characters_is_taken_literally(tmp_path: Path) -> None:
    base = tmp_path / "br[1]*"
    _write(base, "in/x.txt", "in/y.txt")
    _write(tmp_path, "br1/in/z.txt")
    assert _names(base, "in/*.txt") == ["x.txt", "y.txt"]
    assert _names(base, "in/x.txt") == ["x.txt"]
    assert _names(tmp_path, "br[1]*/in/x.txt") == ["br[1]*/in/x.txt"]


def test_a_name_that_is_not_utf8_is_escaped_and_may_not_be_that_of_another_file(
    tmp_path: Path,
) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.txt"))
    try:
        path.write_bytes(b"\xfe")
    except OSError:
        pytest.skip("this file system refuses names that are not UTF-8")
    files = sample_files(find_files(("*.txt",), tmp_path), 100, seed=0)
    assert [f.name for f in files] == ["a\\xff.txt"]
    source = FilesSource(Reading("docs"), files)
    (bad,) = next(source.blocks()).records()
    assert isinstance(bad, BadRecord)
    assert bad.where.encode().endswith(b"/a\\xff.txt")
    assert len(source.revision()) == 64
    (tmp_path / "a\\xff.txt").write_text("backslash")
    with refused("E-SOURCE-DUPLICATE") as caught:
        find_files(("*.txt",), tmp_path)
    assert str(caught.value).count(f"{tmp_path}/a\\xff.txt") == 2


_NAMES = st.sampled_from(["a", "b", ".h", "c[1]", "x.txt", "y.md", ".z.txt"])
_TREES = st.lists(st.lists(_NAMES, min_size=1, max_size=4).map("/".join), min_size=1, max_size=8)
_ANY_PATTERN = st.lists(
    st.sampled_from(["**", "*", "a", "b", "?", ".*", "[ab]", "*.txt", "x.txt", "c[[]1]"]),
    min_size=1,
    max_size=5,
).map("/".join)


@settings(max_examples=200)
@given(_TREES, _ANY_PATTERN)
def test_a_pattern_finds_the_files_that_glob_finds(
    tmp_path_factory: pytest.TempPathFactory, tree: list[str], pattern: str
) -> None:
    base = tmp_path_factory.mktemp("tree")
    for name in tree:
        with suppress(OSError):  # a file stands where a directory would be
            (base / name).parent.mkdir(parents=True, exist_ok=True)
            (base / name).touch()
    (base / "link").symlink_to(base / "a")
    paths = {base / name for name in glob.glob(pattern, root_dir=base, recursive=True)}
    expected = {path for path in paths if path.is_file()}
    if expected:
        assert {file.path for file in find_files([pattern], base)} == expected
    else:
        with refused("E-SOURCE-NOTFOUND"):
            find_files([pattern], base)


_LITERALS = st.text(alphabet="ab/._-*?", max_size=4)
_CHOICES = st.lists(st.text(alphabet="xyz0", max_size=3), min_size=2, max_size=4)
_SPANS = st.tuples(st.integers(0, 30), st.integers(0, 30), st.booleans())
_PARTS = st.lists(st.one_of(_LITERALS, _CHOICES, _SPANS), max_size=4)


def _spelled(part: str | list[str] | tuple[int, int, bool]) -> tuple[str, list[str]]:
    """A part of a pattern, and the texts it stands for."""
    if isinstance(part, str):
        return part, [part]
    if isinstance(part, list):
        return "{" + ",".join(part) + "}", part
    first, last, is_padded = part
    numbers = range(first, last + 1) if first <= last else range(first, last - 1, -1)
    width = 3 if is_padded else 0
    body = f"{{{first:0{width}d}..{last:0{width}d}}}"
    return body, [f"{number:0{width}d}" for number in numbers]


@given(_PARTS)
def test_braces_stand_for_every_combination_in_order(
    parts: list[str | list[str] | tuple[int, int, bool]],
) -> None:
    spelled = [_spelled(part) for part in parts]
    pattern = "".join(text for text, _ in spelled)
    every = ["".join(texts) for texts in itertools.product(*(texts for _, texts in spelled))]
    if len(every) < 50_000:
        assert expand_braces(pattern) == list(dict.fromkeys(every))


@pytest.mark.parametrize(
    ("pattern", "first", "last"),
    [("{008..11}", "008", "011"), ("{8..011}", "008", "011"), ("{8..11}", "8", "11")],
)
def test_numbers_are_as_wide_as_the_wider_end_where_one_begins_with_a_zero(
    pattern: str, first: str, last: str
) -> None:
    expanded = expand_braces(pattern)
    assert (expanded[0], expanded[-1], len(expanded)) == (first, last, 4)


def test_equal_names_and_a_long_pattern_are_counted_too() -> None:
    assert expand_braces("{a,a}" * 10) == ["a" * 10]
    for pattern in ("{a,a}" * 60, "{a,b}" * 2**16, "a" * 2**17):
        with refused("E-SOURCE-PATTERN", "too many names"):
            expand_braces(pattern)


def test_a_pattern_stands_for_a_hundred_thousand_names_and_no_more() -> None:
    for pattern in ("{1..100000}", "{000001..100000}", "{1..1000}-{1..100}"):
        assert len(expand_braces(pattern)) == 100_000
    for pattern in ("{0..100000}", "{1..1001}-{1..100}"):
        with refused("E-SOURCE-PATTERN", "too many names"):
            expand_braces(pattern)


@given(st.text(alphabet="{},.0123456789a*", max_size=40))
def test_any_pattern_expands_or_is_one_error(pattern: str) -> None:
    try:
        expanded = expand_braces(pattern)
    except SourceError:
        return
    assert expanded
    assert all(expand_braces(text) == [text] for text in expanded)


@given(st.text(max_size=20).filter(lambda text: "{" not in text))
def test_any_text_as_a_path_gives_files_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, pattern: str
) -> None:
    base = tmp_path_factory.getbasetemp() / "nothing"
    base.mkdir(exist_ok=True)
    if pattern.startswith("/") or ".." in pattern:
        return
    with pytest.raises(SourceError):
        find_files([pattern], base)


@pytest.mark.parametrize(
    "links",
    [
        {"a/l": ".."},
        {"l": "."},
        {"a/b/l": "../../a"},
        {"a/x/to_y": "../y", "a/y/to_x": "../x"},
        {"out": "{outside}"},
    ],
    ids=str,
)
def test_links_that_lead_back_to_a_directory_above_are_refused_by_name(
    tmp_path: Path, links: dict[str, str]
) -> None:
    _write(tmp_path, "in/a/f.txt", "in/a/b/g.txt", "in/a/x/h.txt", "in/a/y/i.txt", "outside/k.txt")
    (tmp_path / "outside" / "back").symlink_to(tmp_path / "in")
    for name, target in links.items():
        (tmp_path / "in" / name).symlink_to(target.format(outside=tmp_path / "outside"))
    for pattern in ("in/**/*.txt", "in/**", "{in,in}/**/f.txt", "i*/**/*.txt", f"{tmp_path}/**/*"):
        with refused("E-SOURCE-LOOP", "leads to a directory above itself") as caught:
            find_files((pattern,), tmp_path, follow_links=True)
        assert str(tmp_path) in str(caught.value)
    assert _names(tmp_path, "in/a/*.txt") == ["f.txt"]


def test_links_that_do_not_lead_back_are_followed(tmp_path: Path) -> None:
    _write(tmp_path, "in/a/f.txt", "elsewhere/deep/g.txt", "in/.hidden/h.txt")
    (tmp_path / "in" / "b").symlink_to("a")
    (tmp_path / "in" / "e").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "one.txt").symlink_to("a/f.txt")
    (tmp_path / "in" / "itself").symlink_to("itself")
    (tmp_path / "in" / ".hidden" / "up").symlink_to("..")
    found = find_files(["in/**/*.txt"], tmp_path, follow_links=True)
    assert [file.name for file in found] == ["a/f.txt", "b/f.txt", "e/deep/g.txt", "one.txt"]
    (tmp_path / "in" / "e").unlink()
    assert _names(tmp_path, "in/**/*.txt") == ["a/f.txt", "b/f.txt", "one.txt"]


@pytest.mark.parametrize(
    ("link", "target", "patterns"),
    [
        ("in/x.txt", "out/secret.txt", ["in/*.txt"]),
        ("in/x.txt", "out/secret.txt", ["in/**/*.txt"]),
        ("in/x.txt", "out/secret.txt", ["local://{base}/in/*.txt"]),
        ("in/x.txt", "out/secret.txt", ["in/{a,x}.t*"]),
        ("in/x.txt", "out/secret.txt", ["in/?.txt", "in2/*.txt", "out/named.txt"]),
        ("in/deep/d", "out", ["in/**/*.txt"]),
        ("in/deep/d", "out", ["in/**/*.md"]),
        ("in/deep/d", "out", ["in/*/*/secret.txt"]),
        ("in/deep/d", "/", ["in/**/*.txt"]),
        ("in/deep/d", "", ["in/de*/**/*.txt"]),
        ("in/deep/d", "/proc", ["in/**/*.txt"]),
    ],
)
def test_a_link_out_of_the_directories_that_patterns_name_is_refused_unless_asked_for(
    tmp_path: Path, link: str, target: str, patterns: list[str]
) -> None:
    _write(tmp_path, "in/a.txt", "in/deep/c.md", "in2/b.txt", "out/secret.txt", "out/named.txt")
    (tmp_path / link).symlink_to(tmp_path / target)
    patterns = [pattern.replace("{base}", str(tmp_path)) for pattern in patterns]
    with refused("E-SOURCE-LINK", naming=[link]) as caught:
        find_files(patterns, tmp_path)
    if target.startswith("out"):
        assert "symbolic links (1 in total) lead out" in str(caught.value)
        assert "follow_links = true" in str(caught.value)
        assert find_files(patterns, tmp_path, follow_links=True)


def test_what_a_pattern_names_may_be_a_link_and_links_lead_into_it(tmp_path: Path) -> None:
    _write(tmp_path, "disk/a.txt", "disk/deep/b.txt", "disk/c[1].txt", "other/d.txt")
    (tmp_path / "in").symlink_to("disk")
    (tmp_path / "one.txt").symlink_to("other/d.txt")
    (tmp_path / "disk" / "e.txt").symlink_to(tmp_path / "other" / "d.txt")
    (tmp_path / "other" / "up").symlink_to("../disk/deep")
    assert _names(tmp_path, "one.txt") == ["one.txt"]
    assert _names(tmp_path, "in/{a,e}.txt", "in/c[1].txt") == ["a.txt", "c[1].txt", "e.txt"]
    assert _names(tmp_path, "in/deep/*.txt") == ["b.txt"]
    assert _names(tmp_path, "*/deep/*.txt") == ["disk/deep/b.txt", "in/deep/b.txt"]
    assert "disk/e.txt" in _names(tmp_path, "disk/**/*.txt", "other/**/*.txt")
    with refused("E-SOURCE-LINK", naming=["in/e.txt", "other/d.txt"]):
        find_files(["in/*.txt"], tmp_path)
    kept = find_files(["in/*.txt"], tmp_path, ["e.*"])  # the link is left out by its name
    assert [file.name for file in kept] == ["a.txt", "c[1].txt"]


@pytest.mark.parametrize("target", ["/proc/self/environ", "/sys/kernel/uevent_seqnum"])
@pytest.mark.parametrize("pattern", ["in/*.txt", "in/env.txt", "in/**"])
def test_what_the_system_tells_of_processes_is_never_text(
    tmp_path: Path, target: str, pattern: str
) -> None:
    if not Path(target).is_file():
        pytest.skip("not on this system")
    _write(tmp_path, "in/a.txt")
    (tmp_path / "in" / "env.txt").symlink_to(target)
    for patterns in ([pattern], [target]):
        with refused("E-SOURCE-LINK", "are not read"):
            find_files(patterns, tmp_path, follow_links=True)


def test_a_source_that_follows_links_has_the_same_reading_digest(tmp_path: Path) -> None:
    _write(tmp_path, "in/a.txt", "out/b.txt")
    (tmp_path / "in" / "b.txt").symlink_to("../out/b.txt")
    keys = {"id": "web", "kind": "files", "paths": ("in/*.txt",)}
    with refused("E-SOURCE-LINK"):
        opened(tmp_path, **keys)
    source, _ = opened(tmp_path, **keys, follow_links=True)
    assert [record.id for record in records(source)] == ["web/a.txt:0", "web/b.txt:0"]
    specs = [SourceSpec(**keys, follow_links=follow) for follow in (True, False)]
    assert len({spec.reading_digest("train") for spec in specs}) == 1


def test_text_files_are_documents_named_by_their_path_in_the_tree(tmp_path: Path) -> None:
    for name, payload in {"b/x.md": b"bx", "a.md": b"a", "b/y.txt": b"y", "c.md": b"\xff"}.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes(payload)
    source, _ = opened(tmp_path, kind="files", paths=["tree/**/*.md"], on_error="skip")
    first, second, bad = records(source)
    assert (first.id, first.text) == ("web/a.md:0", "a")
    assert (second.id, second.text) == ("web/b/x.md:0", "bx")
    assert isinstance(bad, BadRecord)
    assert "not UTF-8 at byte 0" in bad.reason
    before = source.revision()
    (tmp_path / "tree" / "a.md").write_bytes(b"A")
    assert source.revision() != before


@settings(max_examples=60)
@given(payloads=st.lists(ANY_BYTES, min_size=1, max_size=4), size=st.integers(1, 40))
def test_any_files_are_documents_or_bad_records_in_order(
    tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes], size: int
) -> None:
    files = []
    for i, payload in enumerate(payloads):
        path = tmp_path_factory.getbasetemp() / f"{i}.txt"
        path.write_bytes(payload)
        files.append(SourceFile(path, path.name))
    with patch("nmoe_core.sources.file_sources.BLOCK_BYTES", size):
        source = FilesSource(Reading("f"), files)
        found, ends = records(source), [block.end for block in source.blocks()]
        rest = records(source, ends[0])
    assert [r.row for r in found] == list(range(len(payloads)))
    assert found[ends[0].row :] == rest
    for record, payload in zip(found, payloads):
        encoding = marked_encoding(payload)
        if isinstance(record, Record):
            assert record.text == payload.decode(encoding)
        else:
            with pytest.raises(UnicodeDecodeError):
                payload.decode(encoding)


def test_a_text_file_past_the_limit_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 3 * 2**20)
    (tmp_path / "b.txt").write_bytes(b"a")
    keys = {"kind": "files", "max_record_mb": 2}
    with refused("E-SOURCE-RECORD", naming=[str(tmp_path / "a.txt")]):
        list(opened(tmp_path, paths=["*.txt"], **keys).source.blocks())
    (tmp_path / "c.txt").write_bytes(b"a" * 2 * 2**20)
    for number in (0, 1):
        packed = gzip.compress(b"a" * (2 * 2**20 + number), mtime=0)
        (tmp_path / f"d{number}.txt.gz").write_bytes(packed)
    source = opened(tmp_path, paths=["[bcd]*"], **keys).source
    *read, bad = records(source)
    assert [len(record.text) for record in read] == [1, 2 * 2**20, 2 * 2**20]
    assert bad.reason == f"more than {2 * 2**20} bytes of text"
    assert sum(block.size_bytes for block in source.blocks()) == source.size_bytes()


def test_a_sample_of_files_is_seeded_and_bounded(tmp_path: Path) -> None:
    for i in range(50):
        (tmp_path / f"{i}.txt").write_text("x" * 100)
    files = find_files(["*.txt"], tmp_path)
    assert [len(sample_files(files, size, seed=0)) for size in (99, 100)] == [0, 1]
    sample = sample_files(files, 1000, seed=1)
    assert len(sample) == 10
    assert sample == sample_files(files, 1000, seed=1)
    assert sample != sample_files(files, 1000, seed=2)
    assert sample == [f for f in files if f in sample]
    keys = {"kind": "files", "paths": ["*.txt"], "sample_mb": 0.001, "sample_seed": 1}
    assert len(records(opened(tmp_path, **keys).source)) == 10
