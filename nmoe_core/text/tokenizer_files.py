"""Tokenizers from files: `tokenizer.json` and SentencePiece models, local or on the hub.

Special tokens in text are encoded as ordinary text. The fingerprint covers everything that
determines the ids of a text: the normaliser, splitting, model and added tokens of a
`tokenizer.json` in canonical JSON, or the bytes of a SentencePiece model.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from loader.files.regular import read_file
from loader.plan.settings import TOKENIZER_FILES
from nmoe_core.base.errors import one_line
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.text.reference import Kind, Reference, TokenBytes, is_failure, unreadable

BESIDE = ("tokenizer_config.json", "generation_config.json")
_FILES = (*TOKENIZER_FILES, *BESIDE)
_DECIDING = ("normalizer", "pre_tokenizer", "model", "added_tokens")
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
_BLANK = "\u2581"  # SentencePiece's character for a blank
# The bytes that ByteLevel (GPT-2) writes as the character itself: the printable bytes.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_LEVEL = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_LEVEL |= {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
# What decodes the tokens of a `tokenizer.json` that is converted from SentencePiece.
_REPLACE = {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "}
_PIECE_DECODERS = [_REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_NO_UTF8 = b"\xff"
_MAX_GROWTH = 64  # a few replacements by 16 characters each fill the memory of any machine
# Tokens that end a turn of a chat, and so cannot be the EOS of documents.
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|eot|>")


class JsonReference(Reference):
    """A `tokenizer.json`. Raises TokenizerError if `tokenizers` is not installed or cannot load the
    file (E-TOKENIZER-FILE)."""

    kind: Kind = "tokenizers"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.directory = path.parent
        try:
            self.data: dict[str, Any] = orjson.loads(read_file(path))
            added = self.data.get("added_tokens") or []
            ids = {token["content"]: int(token["id"]) for token in added}
            self._special = {t["content"]: int(t["id"]) for t in added if t.get("special")}
            self._ids = _vocabulary(self.data["model"]) | ids
            self.vocab_size = max(self._ids.values()) + 1
            self.num_ids = len(self._ids)
            if pairs := self.data["model"].get(
                "merges"
            ):  # a merge is a list, or two tokens separated by a blank
                pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in pairs]
                self.data["model"]["merges"] = pairs
                _check_merges(pairs, self.data["model"].get("continuing_subword_prefix") or "")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise unreadable(path, repr(error)) from error
        if (growth := _growth(self.data.get("normalizer"))) > _MAX_GROWTH:
            raise unreadable(path, f"a normalizer that makes texts {growth:,.0f} times as long")
        if dropout := self.data["model"].get("dropout"):
            found = f"dropout = {dropout}, which makes ids random"
            raise unreadable(path, found, "set it to null in a copy of the file")
        self.added = tuple(token for token in ids if token not in self._special)
        self.specials = tuple(self._special)
        self.whole_texts = self.data["model"].get("type") == "Unigram"
        deciding = {key: self.data.get(key) for key in _DECIDING} | {"ordinary": True}
        self.fingerprint = sha256_json(deciding)
        self.name = f"tokenizer-{self.fingerprint[:16]}"
        self.own = _own_tokens(path.parent, self._ids)

    @cached_property
    def library(self) -> Any:
        """The library's tokenizer, set to encode special tokens as ordinary text."""
        own = self._loaded()
        own.encode_special_tokens = True
        return own

    @cached_property
    def _with_specials(self) -> Any:
        return self._loaded()

    def _loaded(self) -> Any:
        try:
            import tokenizers
        except ImportError:
            do = "pip install 'nmoe-data[hf]'"
            raise unreadable(self.path, "tokenizers is not installed", do) from None
        try:
            own = tokenizers.Tokenizer.from_str(orjson.dumps(self.data).decode())
        except BaseException as error:
            if not is_failure(error):
                raise
            raise unreadable(self.path, one_line(error)) from error
        own.no_truncation()
        own.no_padding()
        return own

    def row(self, text: str) -> Sequence[int]:
        # One text at a time: a batch would start threads, which a forked worker cannot use.
        parts = [text] if self._inside is None else self._inside.split(text)
        encode = self.library.encode
        return [i for part in parts for i in encode(part, add_special_tokens=False).ids]

    def row_with_specials(self, text: str, is_prompt: bool) -> Sequence[int]:
        encode = self._with_specials.encode
        ids = encode(text, add_special_tokens=False).ids
        complete = encode(text).ids if is_prompt else ids
        return ids if ids[:1] == complete[:1] else complete

    @cached_property
    def _inside(self) -> re.Pattern[str] | None:
        """A pattern for positions inside special tokens. Texts are split at these positions before
        encoding, so that special tokens in text are not recognised."""
        encode = self.library.encode
        places = []
        for token, id_ in self._special.items():
            if len(token) > 1 and id_ in encode(token, add_special_tokens=False).ids:
                places.append(f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})")
        return re.compile("|".join(places)) if places else None

    def decode(self, ids: Sequence[int]) -> str:
        return self.library.decode(ids, skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        return self._ids.get(token)

    def tokens(self) -> Iterable[str]:
        return self._ids.keys() - set(self.specials)

    def spellings(self) -> dict[int, bytes]:
        parts = (self.data.get("pre_tokenizer"), self.data.get("decoder"))
        written = _BYTE_LEVEL if '"ByteLevel"' in orjson.dumps(parts).decode() else {}
        added = {*self.added, *self.specials}
        return {
            i: token.encode() if token in added else _spelling(token, written)
            for token, i in self._ids.items()
        }

    @cached_property
    def token_bytes(self) -> TokenBytes | None:
        """Of a tokenizer of bytes, and of one that is converted from SentencePiece, if the library
        decodes each token as its bytes."""
        decoder = self.data.get("decoder") or {}
        if _without_strip(decoder) == _PIECE_DECODERS:
            return _bytes_of_pieces(self, {i: token for token, i in self._ids.items()})
        if decoder.get("type") != "ByteLevel":
            return None
        spelled = self.spellings()
        found = [spelled.get(i, b"") for i in range(self.vocab_size)]
        if any(self.decode([i]) != one.decode("utf-8", "replace") for i, one in enumerate(found)):
            return None
        return TokenBytes.joined(found)


def _without_strip(decoder: dict[str, Any]) -> list[Any]:
    """The parts of a sequence of decoders, without a last one that strips a blank at the start."""
    parts = decoder.get("decoders") or []
    return parts[:-1] if parts[-1:] == [_STRIP] else parts


def _bytes_of_pieces(reference: Reference, pieces: Mapping[int, str]) -> TokenBytes | None:
    """The bytes of the tokens of a model of SentencePiece, or of one like it: a text may lack the
    blank at its start, and byte pieces that follow each other are decoded together. None if the
    library decodes in another way."""
    decode = reference.decode
    ids = range(reference.vocab_size)
    bytes_of = {i: int(m[1], 16) for i in ids if (m := _BYTE_PIECE.fullmatch(pieces.get(i, "")))}
    letter = next((i for i in ids if decode([i]).isalpha() and i not in bytes_of), None)
    if letter is None:
        return None
    before = decode([letter])
    inside: list[bytes] = []
    first: list[bytes] = []
    for i in ids:
        alone = decode([i]).encode()
        after = decode([letter, i])[len(before) :].encode()
        if i in bytes_of:
            after = bytes([bytes_of[i]])
            alone = after if bytes_of[i] >= 0x80 else alone
        inside.append(after or _NO_UTF8)  # it may separate bytes
        first.append(alone)
    blanks = (i for i in ids if inside[i][:1] == b" " and first[i] not in (b"", inside[i]))
    blank = next(blanks, None)
    for i in ids:  # after a token without text, the next one may be the first
        if not first[i] and (blank is None or decode([i, blank]).encode() != inside[blank]):
            first[i] = _NO_UTF8
    every = [i for i in ids if i not in bytes_of and inside[i] != _NO_UTF8]
    if decode([letter, *every]).encode() != before.encode() + b"".join(inside[i] for i in every):
        return None
    return TokenBytes.joined([*inside, *first])


def _growth(normalizer: Any) -> float:
    """The largest factor by which the replacements of a normalizer make a text longer."""
    if not isinstance(normalizer, dict):
        return 1.0
    growth = 1.0
    for part in normalizer.get("normalizers") or ():
        growth *= _growth(part)
    if normalizer.get("type") == "Replace":
        # The match of a regular expression may be one character.
        replaced = (normalizer.get("pattern") or {}).get("String", "a")
        growth *= max(1.0, len(normalizer.get("content") or "") / max(len(replaced), 1))
    return growth


class PieceReference(Reference):
    """A SentencePiece model. Raises TokenizerError if `sentencepiece` is not installed or cannot
    load the file (E-TOKENIZER-FILE)."""

    kind: Kind = "sentencepiece"

    def __init__(self, path: Path) -> None:
        try:
            import sentencepiece
        except ImportError:
            do = "pip install 'nmoe-data[sentencepiece]'"
            raise unreadable(path, "sentencepiece is not installed", do) from None
        try:
            self.directory = path.parent
            self.data = read_file(path)
            self.library = sentencepiece.SentencePieceProcessor(model_proto=self.data)
            self.vocab_size = int(self.library.get_piece_size())
            pieces = range(self.vocab_size)
            is_control = self.library.is_control
            is_unknown = self.library.is_unknown
            special = [i for i in pieces if is_control(i) or is_unknown(i)]
            self.specials = tuple(map(self.library.id_to_piece, special))
        except (OSError, RuntimeError, ValueError) as error:  # ValueError: invalid UTF-8
            raise unreadable(path, one_line(error)) from error
        self.whole_texts = self._is_unigram()
        self.fingerprint = hashlib.sha256(self.data).hexdigest()
        self.name = f"tokenizer-{self.fingerprint[:16]}"
        ids = {"eos": self.library.eos_id(), "bos": self.library.bos_id()}
        self.own = {key: token for key, token in ids.items() if token >= 0}

    def row(self, text: str) -> Sequence[int]:
        return self.library.encode(text, out_type=int)

    def decode(self, ids: Sequence[int]) -> str:
        return self.library.decode(list(ids))

    def id_of(self, token: str) -> int | None:
        found = self.library.piece_to_id(token)
        return found if self.library.id_to_piece(found) == token else None

    def tokens(self) -> Iterable[str]:
        return map(self.library.id_to_piece, range(self.vocab_size))

    def spellings(self) -> dict[int, bytes]:
        return {i: _spelling(piece, {}) for i, piece in enumerate(self.tokens())}

    @cached_property
    def token_bytes(self) -> TokenBytes | None:
        """Of a model without rules that change decoded texts (field 2 of its field 5)."""
        specs = (spec for number, spec in _fields(self.data) if number == 5)
        if any(number == 2 and rules for spec in specs for number, rules in _fields(spec)):
            return None
        return _bytes_of_pieces(self, dict(enumerate(self.tokens())))

    def _is_unigram(self) -> bool:
        """Whether this is a Unigram model: only these have a second-best encoding."""
        try:
            self.library.nbest_encode("a", nbest_size=2)
        except RuntimeError:
            return False
        return True


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The numbers and values of the texts and messages in a message of Protocol Buffers."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        match tag & 7:
            case 0:
                _, at = _varint(message, at)
            case 2:
                size_bytes, at = _varint(message, at)
                yield tag >> 3, message[at : at + size_bytes]
                at += size_bytes
            case kind:
                at += 8 if kind == 1 else 4


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The integer at a byte of a message, and the byte after it."""
    value = shift = 0
    while message[at] & 0x80:
        value |= (message[at] & 0x7F) << shift
        shift += 7
        at += 1
    return value | message[at] << shift, at + 1


def _check_merges(pairs: Sequence[Sequence[str]], prefix: str) -> None:
    """Raise ValueError if the second token of a merge does not start with the prefix. `tokenizers`
    would remove as many bytes as the prefix has, and may crash."""
    if prefix and not all(second.startswith(prefix) for _, second in pairs):
        raise ValueError(f"a merge with a token that does not start with {prefix!r}")


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    """Ids of the tokens of a model; Unigram lists its tokens."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        return vocabulary
    return {token: i for i, (token, _) in enumerate(vocabulary)}


def _spelling(token: str, written: dict[str, int]) -> bytes:
    """The bytes of a token; `written` maps the characters that represent bytes."""
    if written and written.keys() >= set(token):
        return bytes(written[character] for character in token)
    if match := _BYTE_PIECE.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(_BLANK, " ").encode()


def _own_tokens(directory: Path, ids: dict[str, int]) -> dict[str, int]:
    """Ids of EOS and BOS according to the files beside a `tokenizer.json`.

    Tokens that end a chat turn are excluded, because they do not end a document.
    """
    config = _beside(directory / "tokenizer_config.json")
    generation = _beside(directory / "generation_config.json")
    turns = {ids[token] for token in _TURN_ENDS if token in ids}
    found: dict[str, int] = {}
    for key in ("eos", "bos"):
        named = config.get(f"{key}_token")
        named = named.get("content") if isinstance(named, dict) else named
        token = ids.get(named) if isinstance(named, str) else None
        if token is None and type(given := generation.get(f"{key}_token_id")) is int:
            token = given
        if token is not None and token not in turns:
            found[key] = token
    return found


def _beside(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = orjson.loads(read_file(path))
    except (OSError, ValueError) as error:
        raise unreadable(path, str(error)) from error
    return value if isinstance(value, dict) else {}


def find_file(name: str) -> Path:
    """The tokenizer file with this name."""
    path = Path(name)
    if not path.exists() and not path.is_absolute() and name.count("/") == 1 and not path.suffix:
        path = _of_hub(name)
    if not path.is_dir():
        if not path.is_file():
            raise unreadable(name, "no such file", "correct the path")
        return path
    if (path / _FILES[0]).is_file():
        return path / _FILES[0]
    models = sorted(path.glob("*.model"))
    if len(models) != 1:
        found = f"no tokenizer.json, {len(models)} files *.model"
        raise unreadable(name, found, "give the path of the file")
    return models[0]


def _of_hub(name: str) -> Path:
    """The local directory with a hub repository's tokenizer files; missing files are downloaded."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise unreadable(
            name, "huggingface_hub is not installed", "pip install 'nmoe-data[hf]'"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except Exception as error:
        found = one_line(error)
        raise unreadable(
            name, found, "if the hub cannot be reached, pass a tokenizer file"
        ) from error
