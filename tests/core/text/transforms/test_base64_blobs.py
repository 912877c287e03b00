"""Long runs of base64 are replaced, and long runs of something else are not."""

import base64
import json
import random
from itertools import islice

import pytest

pytest.importorskip("pyarrow")

from tests.core.text.transforms.applied import applied, batch_of, chain_of, one
from tests.growth import growth
from tests.project import REPOSITORY

_RNG = random.Random(0)
_BYTES = _RNG.randbytes(1501)
_BLOB = base64.b64encode(_BYTES).decode()


def _lines(indent: str = "", chars: int = 64) -> str:
    return "\n".join(indent + _BLOB[i : i + chars] for i in range(0, len(_BLOB), chars))


_PEM = f"-----BEGIN CERTIFICATE-----\n{_lines()}\n-----END CERTIFICATE-----"


@pytest.mark.parametrize(
    ("text", "after"),
    [
        (f'x = "{_BLOB}"', 'x = "<blob>"'),
        (f"<img src='data:image/png;base64,{_BLOB}'>", "<img src='<blob>'>"),
        (f"url(data:font/woff;charset=utf-8;base64,{'A' * 600}=)", "url(<blob>)"),
        (_PEM, "-----BEGIN CERTIFICATE-----\n<blob>\n-----END CERTIFICATE-----"),
        (f"a:\n{_lines('    ', 76)}\nb: c", "a:\n    <blob>\nb: c"),
        (
            json.dumps({"key": _PEM, "n": 1}),
            json.dumps({"key": _PEM, "n": 1}).replace(json.dumps(_lines())[1:-1], "<blob>"),
        ),
        (f"to {base64.urlsafe_b64encode(_BYTES).decode()} end", "to <blob> end"),
        (base64.b64encode((REPOSITORY / "README.md").read_bytes()).decode(), "<blob>"),
    ],
)
def test_runs_of_base64_are_replaced_with_what_belongs_to_them(text: str, after: str) -> None:
    assert one(chain_of("base64_blobs"), text) == after


def test_words_on_the_line_after_a_run_stay() -> None:
    assert one(chain_of("base64_blobs"), f"{_BLOB}\nwith words") == "<blob>\nwith words"
    assert one(chain_of("base64_blobs"), f"{_BLOB}\nwith\nx") == "<blob>\nwith\nx"


def _paths(form: str) -> str:
    return "\n".join(form.format(i) for i in range(200))


_OTHERS = {
    "one letter": "A" * 3000,
    "DNA": "".join(_RNG.choices("ACGT", k=3000)),
    "soft-masked DNA": "".join(_RNG.choices("ACGTacgt", k=3000)),
    "protein": "".join(_RNG.choices("ACDEFGHIKLMNPQRSTVWY", k=3000)),
    "digits": "".join(_RNG.choices("0123456789", k=3000)),
    "hexadecimal digits": _RNG.randbytes(1500).hex(),
    "hashes": "\n".join(_RNG.randbytes(32).hex() for _ in range(50)),
    "paths": _paths("src/Components/Widget{0}/DeepFolderName/AnotherFolder/FileNumber{0}"),
    "slugs": _paths("Some-Long-Title-Of-A-Post-About-Many-Things-{0}-And-More-Things-{0}"),
    "addresses": _paths("https://host.org/2020/01/Some-Long-Title-Of-A-Post-{0}/More-Things-{0}"),
    "dashes": "-" * 3000,
    "identifiers": "_".join(_RNG.choices(["Block", "Utf8", "Get", "Http2", "row"], k=400)),
    "code": "var a=function(b,c){return b[c]||d.e(f)};" * 80,
    "a short run": _BLOB[:400],
    "short lines": _lines(chars=40),
}


@pytest.mark.parametrize("name", _OTHERS)
def test_other_long_runs_stay(name: str) -> None:
    text = _OTHERS[name]
    assert one(chain_of("base64_blobs", hex=False), f"x {text} y") == f"x {text} y"


def test_hexadecimal_digits_are_replaced_on_request() -> None:
    text = _OTHERS["hexadecimal digits"]
    assert one(chain_of("base64_blobs", hex=True), f"x {text} y") == "x <blob> y"
    assert one(chain_of("base64_blobs", hex=True), "7" * 3000) == "7" * 3000


def test_blobs_planted_into_real_files_are_found_and_nothing_else() -> None:
    rng = random.Random(1)
    chain = chain_of("base64_blobs")
    files = islice(sorted((REPOSITORY / "nmoe_core").rglob("*.py")), 60)
    texts = [path.read_text("utf-8").strip() for path in files]
    assert applied(chain, texts) == texts
    blobs = [base64.b64encode(rng.randbytes(rng.randrange(500, 5000))).decode() for _ in texts]
    planted = [f"{text}\nDATA = '{blob}'" for text, blob in zip(texts, blobs)]
    assert applied(chain, planted) == [f"{text}\nDATA = '<blob>'" for text in texts]


_UNITS = (
    *("A", "/", "-+", "a" * 59 + " ", "aB1" * 20 + " ", "aB1" * 20 + "\n", "aB1" * 20 + "\\n"),
    *(
        "data:a",
        "data:a;b",
        "data:a;base64,",
        "aB1" * 20 + "\n" + " " * 40,
        "abcd",
        "a" * 61 + "_+",
    ),
    *("aB1" * 20 + "\nabcd\n", "\\n" + "aB1" * 20 + "_"),
)


@pytest.mark.parametrize("unit", _UNITS)
def test_time_follows_the_length_of_a_text(unit: str) -> None:
    chain = chain_of("base64_blobs", min_chars=64)
    small, large = (unit * (size // len(unit)) for size in (2**14, 2**17))
    assert growth(lambda text: chain.apply(batch_of([text])), small, large, 1e-3) < 24
