"""The encoding of Harmony, the prompt format of gpt-oss, and its control tokens. It works offline,
because openai-harmony loads the vocabulary from this project's cache."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from loader.files.regular import read_file
from nmoe_core.base.atomic import write_bytes
from nmoe_core.base.cache import cache_dir
from nmoe_core.base.errors import TokenizerError
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.text.vocabulary import CARRIED, ensure_vocabulary

if TYPE_CHECKING:
    from openai_harmony import HarmonyEncoding

HARMONY = TokenizerSettings("o200k_harmony")
VOCAB_SIZE = 201_088
START = 200006
END = 200007
MESSAGE = 200008
CHANNEL = 200005
RETURN = 200002
CALL = 200012
FIRST_SPECIAL = 199998
# Ids of the words in a message header.
ASSISTANT = 173781
FINAL = 17196
_RANKS_NAME = "o200k_base.tiktoken"


@functools.lru_cache(maxsize=1)
def encoding() -> HarmonyEncoding:
    """The Harmony encoding of gpt-oss, loaded offline, once in a process."""
    try:
        import openai_harmony
    except ImportError as error:
        raise TokenizerError(
            "openai-harmony is not installed",
            do="pip install 'nmoe-data[oracle]'",
            code="E-TOKENIZER-ENGINE",
        ) from error
    # The library reads the directory of its vocabulary from the environment only.
    if "TIKTOKEN_ENCODINGS_BASE" not in os.environ:
        directory = cache_dir() / "harmony"
        if not (directory / _RANKS_NAME).is_file():
            ranks = ensure_vocabulary() / CARRIED["o200k_base"].file
            write_bytes(directory / _RANKS_NAME, read_file(ranks))
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(directory)
    name = openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS
    try:
        return openai_harmony.load_harmony_encoding(name)
    except openai_harmony.HarmonyError as error:
        raise TokenizerError(
            "openai-harmony cannot load its vocabulary",
            where=os.environ["TIKTOKEN_ENCODINGS_BASE"],
            found=str(error),
            do=f"delete {_RANKS_NAME} in this directory; the next run makes the file again",
            code="E-TOKENIZER-VOCABULARY",
        ) from error
