"""Texts of hostile kinds, and every reader of outside text that must take them in linear time.

`python -m tests.growing` measures all readers on all families at 256 kB, 512 kB and 1 MB, and
prints the largest growth per doubling of each reader.
"""

import io
import random
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from pydantic import TypeAdapter

from loader import errors
from loader.files import addresses, nested
from loader.files.format import load_manifest, read_json_object
from loader.plan.tables import read_toml, read_yaml
from nmoe_core.attributes.contamination import Evaluations, contamination
from nmoe_core.attributes.language import language
from nmoe_core.attributes.minhash import signatures
from nmoe_core.attributes.pii import pii
from nmoe_core.attributes.signals import signals
from nmoe_core.audit.takedown.items import read_items
from nmoe_core.base import jsonl
from nmoe_core.base.docid import parse_doc_id
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.cli.output import in_line, print_table
from nmoe_core.config.quality import HttpOracleTable
from nmoe_core.config.rubric import Rubric
from nmoe_core.config.transforms import LinesTable, TransformTable
from nmoe_core.curate.takedown.grams import grams_of
from nmoe_core.curate.topics.clusters import typical_terms
from nmoe_core.labels.oracles import replies
from nmoe_core.labels.oracles.dialects import ChatDialect, final_text
from nmoe_core.labels.oracles.harmony import fenced
from nmoe_core.labels.oracles.heuristic import grade, refusal
from nmoe_core.labels.oracles.text_statistics import measure
from nmoe_core.labels.scores import read_scores
from nmoe_core.report import html
from nmoe_core.sources import formats
from nmoe_core.sources.paths import expand_braces
from nmoe_core.sources.records import Reading
from nmoe_core.sources.spec import parse_split
from nmoe_core.text.long_text import safe_pieces, split_text
from nmoe_core.text.normalise import normalize_batch, normalize_text
from nmoe_core.text.redact import Redactor
from nmoe_core.text.tokenizer import load_tokenizer
from nmoe_core.text.transforms.batch import Batch
from nmoe_core.text.transforms.chain import KINDS, Chain
from nmoe_core.text.transforms.edits import edits_between
from nmoe_core.text.transforms.lines.rules import LineRules
from tests.growth import processor_s

Reader = Callable[[str], object]
_OWN = "function"  # code of the user
HITS = (
    "version 1.2.3.4 me@mail.example.org 8.8.8.8 4111111111111111 DE89370400440532013000 "
    "+49 30 1234567 415-555-2671 https://me:pw@host/a?b=c <|channel|>final<|message|> "
)
UNITS = (
    *"a0 \n\t\r.,:;!?/\\@#%&=+-_~|*^$'\"`()[]{}<>\0\x1b",
    *("\u00a0", "\u3000", "\u200d", "\u0300", "\u0345", "\u0f73", "\ud800", "\ufeff", "\u088f"),
    *("\u6771", "\u3042", "\u1112\u1161", "\u0e01", "\U0001f600", "\U0001f468\u200d", "\u0130"),
    *("a ", "a\n", "\r\n", " \n", "\n\n", "a.", "1.", "1,", "1:", "1 ", "1-", "a@", "a@a.", "1.1_"),
    *("a=", ".a", "a-", "a'", "a\u0301", "\u0315\u0300", "Aa", "A1", "AB12", "a1", "://a:"),
    *("http://", "http://a?", "//", "../", "#s=", ":e=", "<a", "</a>", "<!--", "<|", "<|end|>"),
    *("```\n", '{"a":', '[{"a":', "[1,", "{a,", "{1..9}", '"a",', '\\"', "\\u0041", "\\ud800"),
    *("&amp;", "a: ", "- ", "? ", "a:\n ", "&a *a ", "(a|", "1e", "0x", "1.2.3.4 ", "20 "),
    *("authorization:", "authorization: a ", "javascript", "1 likes\n", "lorem ipsum ", "a\u3002"),
)
FAMILIES: dict[str, Callable[[int], str]] = {
    f"{unit!r} repeated": lambda n, unit=unit: unit * (n // len(unit)) for unit in UNITS
}
FAMILIES |= {
    f"a hit, then {unit!r} repeated": lambda n, unit=unit: HITS + unit * (n // len(unit))
    for unit in UNITS
}
FAMILIES |= {
    f"{unit!r} repeated between letters": lambda n, unit=unit: f"a{unit * n}b"
    for unit in UNITS
    if len(unit) == 1
}
FAMILIES |= {
    f"{first} nested": lambda n, a=first, b=last: a * (n // 8) + b * (n // 8)
    for first, last in (("[", "]"), ("{", "}"), ("(", ")"), ('{"a":', "}"), ("a = [", "]"))
}
FAMILIES |= {
    "a dotted key": lambda n: "a" + ".a" * (n // 2) + " = 1",
    "keys": lambda n: "".join(f"k{i} = 1\n" for i in range(n // 10)),
    "tables": lambda n: "".join(f"[t{i}]\n" for i in range(n // 8)),
    "dotted keys": lambda n: "".join(f"a.b{i} = 1\n" for i in range(n // 12)),
    "a JSON object": lambda n: "{" + ",".join(f'"k{i}":1' for i in range(n // 10)) + "}",
    "a JSON list": lambda n: "[" + "1," * (n // 2) + "1]",
    "a JSON text": lambda n: orjson.dumps({"text": "a" * n}).decode(),
    "JSON escapes": lambda n: '{"text":"' + "\\u0041" * (n // 6) + '"}',
    "JSON surrogates": lambda n: '{"text":"' + "\\ud800" * (n // 6) + '"}',
    "a JSON number": lambda n: '{"text":' + "1" * n + "}",
    "a number": lambda n: "a = " + "1" * n,
    "a YAML list": lambda n: "a:\n" + "- 1\n" * (n // 4),
    "a quote without end": lambda n: 'a = "' + "a" * n,
    "a long text without end": lambda n: 'a = """' + "a\\\n" * (n // 3),
    "comments": lambda n: "#'\n" * (n // 3),
    "a header": lambda n: ",".join(f"c{i}" for i in range(n // 7)) + "\n1,2\n",
    "letters": lambda n: "".join(random.Random(0).choices("abcdefgh", k=n)),
    "words": lambda n: " ".join(_words(random.Random(0), n // 7)),
    "distinct words": lambda n: " ".join(f"{i:06x}" for i in range(n // 7)),
    "any characters": lambda n: "".join(map(chr, _points(random.Random(0), n))),
}


def _words(rng: random.Random, count: int) -> list[str]:
    known = ["".join(rng.choices("abcdefghijklmno", k=6)) for _ in range(5000)]
    return rng.choices(known, k=count)


def _points(rng: random.Random, count: int) -> list[int]:
    return [p for p in rng.choices(range(1, 0x11000), k=count) if not 0xD800 <= p < 0xE000]


def _valid(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _quiet(read: Reader, *errors_of: type[Exception]) -> Reader:
    """A reader whose refusal is an answer too."""

    def quiet(text: str) -> object:
        try:
            return read(text)
        except (ValueError, errors.NmoeError, *errors_of) as error:
            return error

    return quiet


def _of_file(read: Callable[[Path], object], name: str) -> Reader:
    """A reader of a file with the text."""

    def of_file(text: str) -> object:
        path = _directory() / name
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return read(path)

    return _quiet(of_file)


@cache
def _directory() -> Path:
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    return Path(tempfile.mkdtemp(dir=root))


def _of_texts(read: Callable[[pa.Array], object]) -> Reader:
    return lambda text: read(pa.array([_valid(text)], pa.large_string()))


@cache
def _chain(kind: str) -> Chain:
    return Chain([TypeAdapter(TransformTable).validate_python({"kind": kind})])


def _of_transform(kind: str) -> Reader:
    def changed(text: str) -> object:
        return _chain(kind).apply(Batch(*normalize_batch([text]), ["a"]))

    return changed


def _records(path: Path) -> list[Any]:
    from nmoe_core.sources.jsonl import JsonlSource
    from nmoe_core.sources.storage import SourceFile

    source = JsonlSource(Reading("web"), [SourceFile(path, path.name)])
    return [record for block in source.blocks() for record in block.records()]


def _fields(text: str) -> object:
    row = orjson.loads(orjson.dumps({"text": _valid(text), "id": _valid(text)}))
    return jsonl.id_of(row, "id", ""), jsonl.value_of(row, text), jsonl.checked_id(text, "id", "")


@cache
def _evaluations() -> Evaluations:
    return Evaluations.of({"set": [" ".join(["a"] * 20 + ["1"] * 20)]})


@cache
def _dialect() -> ChatDialect:
    rubric = Rubric.load(Path(html.__file__).parents[1] / "configs/rubrics/quality_v1.toml")
    table = HttpOracleTable(base_url="http://127.0.0.1/v1", model="m")
    return ChatDialect(table, rubric, True)


def _reply(text: str) -> object:
    return _dialect().read_reply({"choices": [{"message": {"content": text}}]})


def _question(text: str) -> object:
    return _dialect()._prompt(_valid(text))


def _printed(text: str) -> None:
    sys.stdout, stdout = io.StringIO(), sys.stdout
    try:
        print_table(["a", "b"], [[text, 1], [in_line(text), 2]])
    finally:
        sys.stdout = stdout


def _post(text: str) -> object:
    import asyncio

    async def post(body: bytes) -> Any:
        return 200, text.encode("utf-8", "replace"), {}

    return asyncio.run(replies.post(SimpleNamespace(post=post), b""))  # pyright: ignore


def _without_lines(text: str) -> object:
    normal, payloads = normalize_batch([text])
    return _LINES.edits(Batch(normal, payloads, [""]))


_LINES = LineRules(
    LinesTable(kind="lines", presets=("c4", "refinedweb"), bad_starts=("share", "<|"))
)
READERS: dict[str, Reader] = {
    "loader.errors.without_credentials": errors.without_credentials,
    "loader.errors.printable": errors.printable,
    "loader.errors.one_line": lambda text: errors.one_line(ValueError(text)),
    "loader.errors.NmoeError": lambda text: errors.NmoeError(text, where="a").line(),
    "loader.addresses": lambda text: (addresses.address(text), addresses.join("s3://b/c", text)),
    "loader.nested.json_value": _quiet(nested.json_value),
    "loader.nested.toml_table": _quiet(nested.toml_table),
    "loader.tables.read_toml": _of_file(read_toml, "a.toml"),
    "loader.tables.read_yaml": _of_file(read_yaml, "a.yaml"),
    "loader.format.read_json_object": _of_file(read_json_object, "a.json"),
    "loader.format.load_manifest": _of_file(load_manifest, "manifest.json"),
    "text.redact": Redactor("k" * 40).clean,
    "base.jsonl.parse_json": _quiet(
        lambda text: jsonl.parse_json(text.encode("utf-8", "surrogatepass"), replace=True)
    ),
    "base.jsonl fields": _quiet(_fields),
    "base.docid": _quiet(parse_doc_id),
    "text.normalize_text": normalize_text,
    "text.normalize_batch": lambda text: normalize_batch([text]),
    "text.split_text": lambda text: split_text(text, 8),
    "text.split_text in many": lambda text: split_text(text, len(text) // 64 + 2),
    "text.safe_pieces": lambda text: list(safe_pieces(text, 64)),
    "text.tokenizer": lambda text: load_tokenizer().encode_batch([_valid(text)]),
    "text.tokenizer.reference": _quiet(
        lambda text: load_tokenizer(TokenizerSettings(engine="reference")).encode_batch(
            [_valid(text)]
        )
    ),
    "attributes.signals": _of_texts(signals),
    "transforms.lines": _without_lines,
    "attributes.pii": _of_texts(pii),
    "attributes.language": _of_texts(language),
    "attributes.signatures": _of_texts(signatures),
    "attributes.contamination": _of_texts(lambda texts: contamination(texts, _evaluations())),
    **{f"text.transforms.{kind}": _of_transform(kind) for kind in sorted(KINDS) if kind != _OWN},
    "text.transforms.edits": lambda text: edits_between(text, text[::2] + "\n" + text, "rule"),
    "labels.text_statistics": measure,
    "labels.heuristic": lambda text: (refusal(text), grade(measure(text))),
    "labels.fenced": fenced,
    "labels.read_scores": lambda text: read_scores(text, True),
    "labels.final_text": final_text,
    "labels.read_reply": _reply,
    "labels.prompt": _question,
    "labels.post": _post,
    "labels.retry_after_s": _quiet(lambda text: replies.retry_after_s(text, text)),
    "sources.jsonl": _of_file(_records, "a.jsonl"),
    "sources.json": _of_file(_records, "a.json"),
    "sources.csv": _of_file(_records, "a.csv"),
    "sources.expand_braces": _quiet(expand_braces),
    "sources.parse_split": _quiet(parse_split),
    "sources.formats": lambda text: (
        *(formats.split_of(text), formats.without_split(text), formats.suffixes(text)),
        *(formats.kind_of(text), formats.why_unread(text)),
    ),
    "report.html.escaped": html.escaped,
    "report.html.pictures": html.pictures,
    "cli.print_table": _printed,
    "curate.typical_terms": lambda text: typical_terms([text, "b"], np.arange(2), 2),
    "curate.grams_of": lambda text: grams_of(load_tokenizer().encode_batch([_valid(text)]).ids, 0),
    "audit.read_items": _of_file(read_items, "items.txt"),
}
_MOST = 2**20
_CAP_S = 20
_LEAST_S = 0.03
_ENOUGH = 2.1


def growth_of(read: Reader, family: Callable[[int], str]) -> tuple[float, float]:
    """The growth of processor time for twice the text, at 1 MB or at the first size that takes
    more than 5 s, and the time of that size; 0.0 if it is too short to measure."""
    size = 2**14
    spent = processor_s(read, family(size))
    while size < _MOST and spent < _CAP_S / 4:
        size = _MOST if size == 2**16 and spent < _CAP_S / 256 else 2 * size
        spent = processor_s(read, family(size))
    if spent < _LEAST_S:
        return 0.0, spent
    ratios = []
    for _ in range(4):
        before = max(processor_s(read, family(size // 2)), 1e-5)
        ratios.append(processor_s(read, family(size)) / before)
        if ratios[-1] < _ENOUGH:
            break
    return min(ratios), spent


def main(names: list[str]) -> None:
    """Print a line for each reader: the largest growth, and the slowest family."""
    for name, read in READERS.items():
        if names and not any(part in name for part in names):
            continue
        read("a b c")
        found = [(*growth_of(read, make), family) for family, make in FAMILIES.items()]
        ratio, _, worst = max(found)
        _, spent, slowest = max(found, key=itemgetter(1))
        row = f"{ratio:.2f} | {worst} | {1e3 * spent:.0f} ms | {slowest} |"
        print(f"| {name} | {row}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
