"""Breaks the special tokens that a document spells, before it is sent to a server.

A server renders its chat template as text and tokenises it. If a document spells a special token,
the server reads it as one, so a document could end its turn and write the answer. The tokenizer of
a server is not known here, so the markers of all known families are broken: a space after their
first character makes them ordinary text. Only whole markers are changed; the operators `<|` and
`<|>` of source code are not.
"""

import re
from collections.abc import Sequence

# `<|im_end|>`, `<|eot_id|>`, `<|channel|>`: ChatML, Llama 3 and 4, gpt-oss, Qwen, Phi, GLM.
BARS = r'<\|(?:[\w.:/-]{1,64}|")\|>'
FORMS = (
    BARS,
    r"<｜[^\s<>｜]{1,64}｜>",  # DeepSeek
    r"\[\|\w{1,64}\|\]",  # EXAONE
    r"<\|(?:turn|channel|image|audio|tool(?:_call|_response)?)>",  # Gemma 4 opens
    r"<(?:turn|channel|image|audio|tool(?:_call|_response)?)\|>",  # and closes
    r"</?s>|<</?SYS>>|\[/?INST\]",  # Llama 2, Mistral
    r"\[/?(?:SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CONTENT|THINK)\]",
    r"\[(?:TOOL_CALLS|IMG|IMG_BREAK|IMG_END|gMASK)\]|<sop>|<eop>",  # Mistral, GLM
    r"<(?:start|end)_of_(?:turn|image)>|<(?:bos|eos|pad|unk)>",  # Gemma
    r"</?(?:think|tool_call|tool_response)>",  # Qwen, DeepSeek R1
    r"<(?:BOS|EOS|PAD|UNK)_TOKEN>",  # Command R
    # StarCoder and SmolLM:
    r"<(?:fim_(?:prefix|middle|suffix|pad)|file_sep|repo_?name|gh_stars|empty_output)>",
    r"<(?:issue_(?:start|comment|closed)|jupyter_(?:start|text|code|output|script))>",
)


def pattern(special_tokens: Sequence[str], forms: Sequence[str] = FORMS) -> re.Pattern[str]:
    """A pattern of special tokens, and of markers of these forms, by default of all families."""
    return re.compile("|".join((*map(re.escape, special_tokens), *forms)))


def broken(text: str, markers: re.Pattern[str]) -> str:
    """The text with a space after the first character of each marker."""
    return markers.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
