"""Tables, JSON arrays, chats and encodings: read as declared, refused with file and place."""

import bz2
import csv
import gzip
import io
import json
import lzma
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe_core.base.errors import ConfigError
from nmoe_core.base.strict import validate
from nmoe_core.sources.forms.arrays import json_items
from nmoe_core.sources.records import BadRecord, Reading, Source
from nmoe_core.sources.spec import SourceSpec
from tests.core.sources.read import good, opened, outcome, records, texts
from tests.refusals import refused

MIB = 2**20
ROWS = [[f"n{i}", f'Note "{i}", with\ntwo lines; über', str(i)] for i in range(40)]
NAMES = ["id", "text", "n"]


def _table(directory: Path, payload: bytes | str, name: str = "a.csv", **keys: Any) -> Source:
    payload = payload.encode() if isinstance(payload, str) else payload
    (directory / name).write_bytes(payload)
    return opened(directory, kind="csv", paths=[name], **keys).source


def _written(rows: list[list[str]], **form: Any) -> str:
    text = io.StringIO()
    csv.writer(text, **form).writerows(rows)
    return text.getvalue()


@pytest.mark.parametrize(
    ("name", "form", "keys"),
    [
        ("a.csv", {}, {}),
        ("a.csv", {"lineterminator": "\n", "quoting": csv.QUOTE_ALL}, {}),
        ("a.csv", {"delimiter": ";"}, {"csv_delimiter": ";"}),
        ("a.csv", {"quotechar": "'"}, {"csv_quote": "'"}),
        ("a.tsv", {"delimiter": "\t"}, {}),
    ],
)
def test_a_table_of_the_standard_writer_is_read_with_line_ends_in_its_values(
    tmp_path: Path, name: str, form: dict[str, Any], keys: dict[str, Any]
) -> None:
    text = _written([NAMES, *ROWS], **form)
    for pack, suffix in (
        (bytes, ""),
        (gzip.compress, ".gz"),
        (bz2.compress, ".bz2"),
        (lzma.compress, ".xz"),
    ):
        source = _table(tmp_path, pack(text.encode()), name + suffix, columns=("n",), **keys)
        assert [(r.id, r.text, r.kept) for r in good(source)] == [
            (id_, text, (n,)) for id_, text, n in ROWS
        ]
    assert source.field_names() == NAMES
    without = _written(ROWS, **form)
    source = _table(tmp_path, without, name, csv_names=tuple(NAMES), **keys)
    assert texts(source) == [row[1] for row in ROWS]


def test_a_table_that_arrow_wrote_is_read(tmp_path: Path) -> None:
    sink = pa.BufferOutputStream()
    columns = {name: [row[i] for row in ROWS] for i, name in enumerate(NAMES)}
    pa_csv.write_csv(pa.table(columns), sink)
    assert texts(_table(tmp_path, sink.getvalue().to_pybytes())) == [row[1] for row in ROWS]


def test_a_row_that_does_not_fit_is_a_bad_record_that_names_its_line(tmp_path: Path) -> None:
    lines = 'text,n\n"a\nb",1\nonly\n\n"c\n\n",2\nx,y,z\nlast,3\n'
    found = records(_table(tmp_path, lines))
    said = [str(one) for one in found if isinstance(one, BadRecord)]
    assert [name.removeprefix(f"{tmp_path}/") for name in said] == [
        "a.csv:4: 1 values in a table of 2 columns",
        "a.csv:9: 3 values in a table of 2 columns",
    ]
    assert [one.row for one in found] == [0, 1, 3, 4, 5]


@pytest.mark.parametrize(
    ("payload", "keys", "code", "said"),
    [
        ('text,n\na,1\n"open,2\n', {}, "E-SOURCE-TORN", ["a.csv:3", "unexpected end"]),
        ('text,n\na,1\n"b"c,2\n', {}, "E-SOURCE-TORN", ["a.csv:3", "expected after"]),
        ("body,n\na,1\n", {}, "E-SOURCE-FIELD", ["a.csv:1", "'text' is missing", "body, n"]),
        ("text;n\na;1\n", {}, "E-SOURCE-FIELD", ["'text' is missing", "csv_delimiter"]),
        ("text,text\na,b\n", {}, "E-SOURCE-FIELD", ["two columns 'text'"]),
        ("text,n\n", {"id_field": "key"}, "E-SOURCE-FIELD", ["'key' is missing"]),
        ("text\n" + "a" * 3 * MIB, {"max_record_mb": 2}, "E-SOURCE-RECORD", ["a.csv:2"]),
        ('text\n"' + "a\n" * 2 * MIB + '"', {"max_record_mb": 2}, "E-SOURCE-RECORD", ["a.csv:2"]),
    ],
)
def test_a_table_that_is_not_what_is_declared_is_refused_with_its_line(
    tmp_path: Path, payload: str, keys: dict[str, Any], code: str, said: list[str]
) -> None:
    with refused(code, naming=said):
        records(_table(tmp_path, payload, **keys))


def test_a_table_in_the_kind_of_json_lines_is_refused_with_its_kind(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\na\n")
    with refused("E-SOURCE-FORM", 'set kind = "csv"'):
        records(opened(tmp_path, kind="jsonl", paths=["a.csv"]).source)


def test_quotes_are_text_if_the_source_says_so_and_null_bytes_are_read(tmp_path: Path) -> None:
    assert texts(_table(tmp_path, 'text\n"a\nb\0c\n', csv_quote="")) == ['"a', "b\0c"]


def test_bytes_of_a_table_that_are_not_utf8_are_a_bad_record_or_replaced(tmp_path: Path) -> None:
    payload = "text,n\ncafé,1\nb,2\n".encode("cp1252")
    first, second = records(_table(tmp_path, payload))
    assert outcome(first) == "not UTF-8 at byte 3, perhaps Windows-1252"
    assert second.text == "b"
    [replaced, _] = good(_table(tmp_path, payload, on_error="replace"))
    assert (replaced.text, replaced.is_replaced) == ("caf\ufffd", True)
    assert texts(_table(tmp_path, payload, encoding="cp1252")) == ["café", "b"]


def test_reading_a_table_starts_at_any_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.sources.forms.tables.BLOCK_BYTES", 100)
    source = _table(tmp_path, _written([NAMES, *ROWS, ["odd"]]))
    whole = records(source)
    blocks = list(source.blocks())
    for block, after in pairwise(blocks):
        assert block.end == after.start
        assert records(source, block.end) == [r for r in whole if r.row >= block.end.row]
    assert sum(block.size_bytes for block in blocks) == source.size_bytes()


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"\\,[]{}\n é', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('a"]', max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(
    values=st.lists(_VALUES, max_size=4), indent=st.sampled_from([None, 2]), size=st.integers(1, 9)
)
def test_the_items_of_an_array_are_its_values_in_pieces_of_any_size(
    values: list[Any], indent: int | None, size: int
) -> None:
    class Pieces(io.StringIO):
        def read(self, _: int | None = -1, /) -> str:
            return super().read(size)

    text = json.dumps(values, indent=indent) + " \n"
    lines = list(json_items(Pieces(text), MIB, "a.json"))
    assert [json.loads(line) for line in lines] == values
    assert all(line.count("\n") == 1 for line in lines)


@pytest.mark.parametrize(
    "text",
    [
        '[{"text": "a"}',
        '[{"text": "a',
        '[{"text": "a\\',
        '[{"text": "a\nb"}]',
        "[1,]",
        "[,1]",
        "[}",
        "[[1]",
    ],
)
def test_an_array_that_is_torn_or_not_json_is_refused_with_its_place(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "a.json").write_text(text)
    with refused("E-SOURCE-TORN", naming=["a.json: character"]):
        records(opened(tmp_path, kind="jsonl", paths=["a.json"]).source)


def test_an_array_is_read_item_by_item_in_the_memory_of_one(tmp_path: Path) -> None:
    """It may be longer than the limit of a record, and a small file may unpack to it."""
    item = json.dumps({"text": "a" * 1000})
    payload = f"[{','.join([item] * 20_000)}]".encode()
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(payload))
    keys = {"kind": "jsonl", "paths": ["a.json.gz"], "max_record_mb": 2}
    source = opened(tmp_path, **keys).source
    tracemalloc.start()
    assert source.num_rows() == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 15 * MIB < len(payload)
    long = f'[{item}, {{"text": "{"a" * 3 * MIB}"}}]'.encode()
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(long))
    with refused("E-SOURCE-RECORD", naming=["a.json.gz", "max_record_mb"]):
        records(opened(tmp_path, **keys).source)


def _chat(directory: Path, messages: list[Any], template: str = "plain", **keys: Any) -> Source:
    lines = "".join(json.dumps({"messages": one, "text": "no"}) + "\n" for one in messages)
    (directory / "a.jsonl").write_text(lines)
    table = {"kind": "jsonl", "paths": ["a.jsonl"], "text_field": "messages"}
    return opened(directory, **table, chat_template=template, **keys).source


MESSAGES = [
    {"role": "user", "content": "What is a delta?"},
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "The mouth "},
            {"type": "text", "text": "of a river."},
        ],
    },
]


def test_messages_are_rendered_by_a_named_template_or_the_users_own(tmp_path: Path) -> None:
    assert texts(_chat(tmp_path, [MESSAGES])) == [
        "user: What is a delta?\n\nassistant: The mouth of a river.\n\n"
    ]
    assert texts(_chat(tmp_path, [MESSAGES], "chatml")) == [
        "<|im_start|>user\nWhat is a delta?<|im_end|>\n"
        "<|im_start|>assistant\nThe mouth of a river.<|im_end|>\n"
    ]
    own = "{% for m in messages %}[{{ m.role | upper }}] {{ m.content }}\n{% endfor %}"
    assert texts(_chat(tmp_path, [MESSAGES], own)) == [
        "[USER] What is a delta?\n[ASSISTANT] The mouth of a river.\n"
    ]
    assert texts(_chat(tmp_path, [[]])) == [""]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "huggingface"])
def test_messages_in_columns_are_those_of_json_lines(tmp_path: Path, kind: str) -> None:
    chats = [
        [{"role": "user", "content": "Why?"}, {"role": "tool", "content": "42", "name": "sum"}],
        [],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": "\u6771 \U0001f600"}] * 3000,
    ] * 20
    own = (
        "{% for m in messages %}{{ m.role }}{% if m.name is defined %} {{ m.name }}{% endif %}: "
        "{{ m.content }}\n{% endfor %}"
    )
    ids = [{"id": f"c{i}", "messages": one, "n": i} for i, one in enumerate(chats)]
    table = pa.Table.from_pylist(ids)
    keys = {"text_field": "messages", "id_field": "id", "chat_template": own}
    if kind == "huggingface":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"))
        source = opened(tmp_path, hf_dataset="./saved", **keys, columns=["n"]).source
    else:
        path = tmp_path / f"a.{kind}"
        if kind == "parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=7)
        else:
            with pa.ipc.new_file(path, table.schema) as file:
                file.write_table(table, 7)
        source = opened(tmp_path, kind=kind, paths=[path.name], **keys, columns=["n"]).source
    expected = records(_chat(tmp_path, chats, own))
    found = records(source)
    assert [outcome(one) for one in found] == [outcome(one) for one in expected]
    assert [one.id for one in good(source)][:3] == ["c0", "c1", "c3"]


def test_a_column_without_messages_is_refused(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"text": ["a"], "messages": [["a"]]}), tmp_path / "a.parquet")
    for name in ("text", "messages"):
        keys = {"text_field": name, "chat_template": "plain"}
        with refused("E-SOURCE-FIELD", naming=["not a list of messages"]):
            records(opened(tmp_path, kind="parquet", paths=["a.parquet"], **keys).source)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("a text", "the messages are str, not a list"),
        (["hello"], "message 1 is str, not an object"),
        ([{"content": "a"}], "message 1 has no role"),
        ([{"from": "human", "value": "a"}], "message 1 has no role"),
        ([{"role": "user"}], "the content of message 1 is NoneType, not text"),
        ([{"role": "user", "content": {"a": 1}}], "the content of message 1 is dict, not text"),
        (
            [*MESSAGES, {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "message 3 has a part of type 'image_url', not text",
        ),
    ],
)
def test_messages_that_are_not_text_are_bad_records(
    tmp_path: Path, messages: Any, said: str
) -> None:
    first, second = records(_chat(tmp_path, [messages, MESSAGES]))
    assert isinstance(first, BadRecord)
    assert first.reason == said
    assert outcome(second).startswith("user:")


def test_a_template_cannot_reach_python_and_its_faults_are_named(tmp_path: Path) -> None:
    attack = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    assert "refuses the messages" in outcome(records(_chat(tmp_path, [MESSAGES], attack))[0])
    refuses = "{{ raise_exception('only one turn') }}"
    assert "only one turn" in outcome(records(_chat(tmp_path, [MESSAGES], refuses))[0])
    with refused("E-SOURCE-TEMPLATE", naming=["web"]):
        records(_chat(tmp_path, [MESSAGES], "{% for %}"))
    with pytest.raises(ConfigError, match="no chat template is called 'llama'"):
        _chat(tmp_path, [MESSAGES], "llama")


def test_template_encoding_and_form_are_part_of_the_fingerprint_and_defaults_are_not() -> None:
    def digest(**keys: Any) -> tuple[str, str]:
        table = {"id": "web", "kind": "jsonl", "paths": ["a"]} | keys
        spec = validate(SourceSpec, table, "test")
        return spec.reading_digest("train"), spec.reading.digest

    plain = digest()
    assert plain == digest(encoding="UTF8")
    found = [digest(encoding=name) for name in ("cp1252", "detect")]
    found += [digest(chat_template=text) for text in ("plain", "chatml", "{{ messages }}")]
    assert len({*found, plain}) == 6
    assert len({one[1] for one in (*found, plain)}) == 6
    table = digest(kind="csv")
    assert table != digest(kind="csv", csv_delimiter=";") != digest(kind="csv", csv_quote="")
    assert plain[1] == Reading("web").digest


TEXT = (
    "Der Fluß führt über die Brücke, und das Café öffnet früh. Größere Hügel lägen im Süden. " * 4
)


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-16-le", "shift_jis", "koi8-r"])
def test_a_declared_encoding_is_decoded_strictly(tmp_path: Path, encoding: str) -> None:
    text = {"shift_jis": "川と山の短い文です。", "koi8-r": "Короткий текст о реке."}.get(
        encoding, TEXT
    )
    lines = json.dumps({"text": text}, ensure_ascii=False) + "\n"
    array = json.dumps([{"text": text}], ensure_ascii=False)
    files = {"a.jsonl": lines, "b.json": array, "c.csv": f'text\n"{text}"\n', "d.txt": text}
    for name, payload in files.items():
        for pack, suffix in ((bytes, ""), (gzip.compress, ".gz")):
            (tmp_path / (name + suffix)).write_bytes(pack(payload.encode(encoding)))
            kind = {"c.csv": "csv", "d.txt": "files"}.get(name, "jsonl")
            source = opened(tmp_path, kind=kind, paths=[name + suffix], encoding=encoding).source
            assert [one.strip("\ufeff") for one in texts(source)] == [text]


def test_bytes_that_are_not_of_the_declared_encoding_are_refused_with_their_place(
    tmp_path: Path,
) -> None:
    payload = b'{"text": "a"}\n' * 100_000 + b'{"text": "\x81"}\n'
    (tmp_path / "a.jsonl").write_bytes(payload)
    source = opened(tmp_path, kind="jsonl", paths=["a.jsonl"], encoding="cp1252").source
    place = f"a.jsonl: byte {payload.index(0x81)}"
    with refused("E-SOURCE-ENCODING", naming=[place, "found 0x81"]):
        records(source)
    (tmp_path / "a.txt").write_bytes(b"abc \x81")
    [bad] = records(opened(tmp_path, kind="files", paths=["a.txt"], encoding="cp1252").source)
    assert "at byte 4" in outcome(bad)


@pytest.mark.parametrize("encoding", ["cp1252", "utf-8", "utf-16", "utf-16-le", "utf-16-be"])
def test_an_encoding_is_detected_for_each_file_and_named(tmp_path: Path, encoding: str) -> None:
    line = json.dumps({"text": TEXT}, ensure_ascii=False) + "\n"
    (tmp_path / "a.jsonl").write_bytes((line * 30).encode(encoding))
    (tmp_path / "b.txt").write_bytes(TEXT.encode(encoding))
    for kind, name in (("jsonl", "a.jsonl"), ("files", "b.txt")):
        source = opened(tmp_path, kind=kind, paths=[name], encoding="detect").source
        assert {text.strip("\ufeff") for text in texts(source)} == {TEXT}
        [block] = source.blocks()
        [first, *_] = good(source)
        assert (block.detected or first.encoding) == encoding


def test_a_file_in_no_encoding_of_text_is_a_bad_record(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 40)
    [found] = records(opened(tmp_path, kind="files", paths=["a.txt"], encoding="detect").source)
    assert isinstance(found, BadRecord)
    assert "no encoding of text fits" in found.reason


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("El niño pequeño irá mañana a España con su compañera. ", "cp1252"),
        ("Le garçon a été élevé près de la forêt où les chênes étaient âgés. ", "cp1252"),
        ("A informação não é tão difícil; há maçãs, pães e lições. ", "cp1252"),
        ("Åsa gick över ån till ön för att äta köttbullar. ", "cp1252"),
        ("Příliš žluťoučký kůň úpěl ďábelské ódy v zámku. ", "cp1250"),
        ("Быстрая лиса прыгнула через реку и ушла в лес. ", "cp1251"),
        ("川と山の短い文です。今日はとても天気がいい。", "shift_jis"),
        ("关于河流和山丘的短文。今天天气很好。", "gb18030"),
    ],
)
def test_detection_gives_the_text_of_many_languages(
    tmp_path: Path, text: str, encoding: str
) -> None:
    (tmp_path / "a.txt").write_bytes((text * 5).encode(encoding))
    source = opened(tmp_path, kind="files", paths=["a.txt"], encoding="detect").source
    assert texts(source) == [text * 5]
