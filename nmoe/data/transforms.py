"""Text as prep normalises and tokenises it."""

from nmoe_core.text.normalise import normalize_text
from nmoe_core.text.tokenizer import tokenize

__all__ = ["normalize_text", "tokenize"]
