"""Proves or disproves that a fast engine gives the same ids as its reference.

Engine and reference first encode test texts of every kind, with the tokenizer's added tokens in
many contexts. If the ids differ on a test text, the engine is not used. Then engine and reference
encode every code point in a few contexts. The ids of some code points differ, because libraries
follow different versions of Unicode. These code points are recorded, and documents that contain one
of them are encoded by the reference. A proof takes 1 to 10 s. Its result is cached by the
tokenizer's fingerprint and the versions of engine and reference.
"""

import random
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from nmoe_core.text.engines import (
    EncodeBytes,
    Fast,
    Unfit,
    engine_version,
    load_engine,
    panics_as_unfit,
)
from nmoe_core.text.normalise import normalize_batch, pieces
from nmoe_core.text.reference import Encoded, Reference
from nmoe_core.text.vocabulary import keep, kept

PROBES = (
    "The quick brown fox jumps over the lazy dog. 1234567890",
    "def f(x):\n\treturn x ** 2  # ok\n\n\n",
    "<|endoftext|> <|start|>assistant",
    "naïve café — “quotes” … 東京タワー Привет שלום \u1e9b\u0323",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 'LL 'Ve 's 000000 !!!???",
    " " * 40 + "\n" * 5 + "a" * 300,
    "z" * 5000,
    "한국어 हिन्दी ไทย العربية Ελληνικά ﬁ ² Ⅷ ｆｕｌｌ １２３ ﷺ ½ ß İı ſ",
    "https://example.com/path?q=1&x=2#frag <b>x</b> {a: [1, 2.5e-3]} C:\\dir\t|\t$5",
)
_ATOMS = (
    "a b c the The THE ing 's 'S 'll ’s n't 1 12 345 6789 0.5 １ ² Ⅷ ½ _ __ - -- — ... … ! ? ; . , "
    "é e\u0301 ё И ß ΣΑΣ ﬁ İ 京 東京 、 。 か カ゚ 가 각 ไทย हि א ع 🙂 👍🏽 👩\u200d👩\u200d👧 🇩🇪 "
    "𝒳 < > / \\ { } # @ <s> [UNK] ▁ Ġ ## \ufffd \u200b \u200d"
)
_BLANKS = [" ", " ", "  ", "   ", "\t", "\n", "\n\n", "\u00a0", "\u3000", "\u2003"]
_NUM_TEXTS = 1500
# Unicode planes with letters, marks and numbers; every other plane has characters of only one kind.
SWEPT = (range(0x20, 0xD800), range(0xE000, 0x40000), range(0xE0000, 0xE1000))
_CHUNK = 64
VERSION = 1


class Suspects:
    """Finds texts that an engine may encode differently from its reference, by their code points
    and special tokens."""

    def __init__(self, points: Sequence[int], engine: Fast) -> None:
        self._spellings = [text.encode() for text in engine.is_split_on]
        self._is_for_stripped = engine.is_for_stripped
        self._pairs = np.zeros(2**16, np.bool_)
        for point in points:
            first, second = chr(point).encode().ljust(2, b"\0")[:2]
            self._pairs[first | second << 8] = True  # the number that two bytes give, little-endian
        ranges = "".join(f"{chr(a)}-{chr(b)}" for a, b in _ranges(points))
        self._exact = re.compile(f"[{ranges}]") if points else None
        self._least_byte = min((chr(point).encode()[0] for point in points), default=0)

    def among(self, texts: Sequence[str], payloads: Sequence[bytes]) -> list[int]:
        """Indices of the texts that the engine may encode differently."""
        found = set()
        if self._exact is not None:
            found = {i for i in self._may_hold(texts, payloads) if self._exact.search(texts[i])}
        if self._is_for_stripped:
            found |= {i for i, text in enumerate(texts) if text != text.strip()}
        for spelling in self._spellings:
            found |= {i for i, payload in enumerate(payloads) if spelling in payload}
        return sorted(found)

    def _may_hold(self, texts: Sequence[str], payloads: Sequence[bytes]) -> list[int]:
        """Indices of texts that contain the first two bytes of a suspect code point; scans all
        non-ASCII texts at once."""
        other = [i for i, payload in enumerate(payloads) if len(payload) != len(texts[i])]
        ends = np.cumsum([len(payloads[i]) for i in other])
        places = [np.empty(0, np.int64)]
        for start, view in pieces(b"".join([payloads[i] for i in other]), 1):
            first = np.flatnonzero(view[:-1] >= self._least_byte)
            pairs = view[first] | view[first + 1].astype(np.uint16) << 8
            places.append(first[self._pairs[pairs]] + start)
        held = set(np.searchsorted(ends, np.concatenate(places), side="right").tolist())
        return [other[k] for k in held]


class Proven:
    """An engine that is proved to give the reference's ids, except for texts in `suspects`; loaded
    on first use."""

    def __init__(self, name: str, reference: Reference) -> None:
        self.name = name
        self._reference = reference
        found = prove(name, reference)
        self._engine = load_engine(name, reference)
        self.suspects = Suspects(found, self._engine)

    @property
    def encode(self) -> EncodeBytes:
        return self._engine.encode


def prove(name: str, reference: Reference) -> list[int]:
    """The code points that an engine encodes differently from the reference. Raises Unfit if the
    engine cannot be used for this tokenizer."""
    file = _file(name, reference)
    if (found := kept(file)) is None:
        try:
            engine = load_engine(name, reference)
            with panics_as_unfit(name):
                found = {"suspects": _compared(engine, reference), "unfit": None}
        except Unfit as error:
            found = {"suspects": [], "unfit": str(error)}
        keep(file, found)
    if found["unfit"] is not None:
        raise Unfit(found["unfit"])
    return [point for first, last in found["suspects"] for point in range(first, last + 1)]


def disprove(name: str, reference: Reference, reason: str) -> None:
    """Record that an engine differs from the reference, so that later processes do not use the
    engine."""
    keep(_file(name, reference), {"suspects": [], "unfit": reason})


def _file(name: str, reference: Reference) -> str:
    versions = f"{engine_version(name)}-{reference.kind}-{reference.version}"
    return f"{reference.fingerprint[:32]}-{name}-{versions}-{VERSION}.json"


def _compared(engine: Fast, reference: Reference) -> list[tuple[int, int]]:
    raw = probe_texts(_own(reference))
    texts = [*raw, *normalize_batch(raw)[0]]
    payloads = [text.encode() for text in texts]
    apart = set(Suspects((), engine).among(texts, payloads))
    kept = [i for i in range(len(texts)) if i not in apart]
    found = engine.encode([payloads[i] for i in kept])
    expected = reference.encode([texts[i] for i in kept])
    for k, differs in enumerate(_differing(found, expected)):
        if differs:
            raise Unfit(f"its ids differ on {texts[kept[k]][:60]!r}")
    return list(_ranges(_sweep(engine.encode, reference)))


def probe_texts(own: Sequence[str] = (), count: int = _NUM_TEXTS) -> list[str]:
    """Texts of every kind, with a tokenizer's own special and added tokens."""
    rng = random.Random(7)
    atoms = [*_ATOMS.split(" "), *_BLANKS, *own, *own[:20], *(token.upper() for token in own[:10])]
    made = ["".join(rng.choices(atoms, k=rng.randrange(1, 24))) for _ in range(count)]
    around = [f"x{token}y {token} {token}{token}1{token}\n{token}" for token in own]
    return [*PROBES, *around, *made]


def _own(reference: Reference) -> list[str]:
    """Up to 40 added tokens of a tokenizer, and up to 40 special tokens."""
    added = random.Random(7).sample(reference.added, min(40, len(reference.added)))
    return [*added, *reference.specials[:40]]


def _sweep(encode: EncodeBytes, reference: Reference) -> Iterator[int]:
    """Code points that engine and reference encode differently. Compares chunks of code points
    first, then each code point of a differing chunk."""
    chunks = _chunks()
    texts = ["".join(map(_surrounded, chunk)) for chunk in chunks]
    found = encode([text.encode() for text in texts])
    for chunk, differs in zip(chunks, _differing(found, _swept(reference))):
        if differs:
            alone = [_surrounded(point) for point in chunk]
            one_by_one = encode([text.encode() for text in alone])
            differing = list(_differing(one_by_one, reference.encode(alone)))
            # If no single code point differs, the difference depends on neighbours, so all code
            # points of the chunk are suspects.
            yield from (p for p, d in zip(chunk, differing) if d or not any(differing))


@lru_cache(maxsize=1)
def _swept(reference: Reference) -> Encoded:
    """The reference's ids of all chunks, cached for several engines."""
    return reference.encode(["".join(map(_surrounded, chunk)) for chunk in _chunks()])


def _chunks() -> list[range]:
    return [part[at : at + _CHUNK] for part in SWEPT for at in range(0, len(part), _CHUNK)]


def _surrounded(point: int) -> str:
    """A text with a code point in several contexts, in which letters, numbers, marks and blanks are
    split differently."""
    c = chr(point)
    return f"a{c}b {c}'s1{c}2345\n!{c} x\u0345{c}\u0334A{c}'LL/\n"


def _differing(found: Encoded, expected: Encoded) -> Iterator[bool]:
    if np.array_equal(found.ids, expected.ids) and np.array_equal(found.offsets, expected.offsets):
        yield from [False] * (len(expected.offsets) - 1)
        return
    rows = (np.split(one.ids, np.asarray(one.offsets)[1:-1]) for one in (found, expected))
    yield from (not np.array_equal(a, b) for a, b in zip(*rows))


def _ranges(points: Sequence[int] | Iterator[int]) -> Iterator[tuple[int, int]]:
    """The first and last number of each run of consecutive numbers."""
    first = last = -2
    for point in sorted(points):
        if point != last + 1:
            if last >= 0:
                yield first, last
            first = point
        last = point
    if last >= 0:
        yield first, last
