"""The oracle's prompt in a model's own chat template, for families other than gpt-oss.

The template is rendered once, around a mark in place of the document. The rubric is the system
message; if the template refuses one, the rubric begins the user's message. Special tokens that a
document spells are ordinary text. If a prompt is too long, the end of the document is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nmoe_core.base.errors import CheckpointError, TokenizerError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.config.rubric import Rubric
from nmoe_core.engine.weights.config import ModelConfig
from nmoe_core.engine.weights.weight_files import end_ids
from nmoe_core.labels.oracle import OracleResult
from nmoe_core.labels.oracles.dialects import without_thoughts
from nmoe_core.labels.oracles.harmony import (
    CONVERSATION_DATE,
    PROMPT_VERSION,
    Reasoning,
    fenced,
    require_room,
)
from nmoe_core.labels.scores import Scale, read_scores
from nmoe_core.text.chat.template import Chat
from nmoe_core.text.models import model_tokenizer
from nmoe_core.text.tokenizer import load_tokenizer

_DOCUMENT = "\ufdd1"  # stands for the document; it is not a character, so no text contains it
_END_OF_THOUGHTS = "</think>\n\n"


class TemplatePrompt:
    """Prompts of one rubric, at most `max_tokens` long, and the answers to them.

    With reasoning `none`, the template is told `enable_thinking = false`. `to_final` ends the
    reasoning of models that write it between `<think>` and `</think>`.

    Raises CheckpointError if the model has no tokenizer (E-CHECKPOINT-SHAPE), no EOS id
    (E-CHECKPOINT-CONFIG) or no chat template that can be used (E-CHECKPOINT-TEMPLATE); ConfigError
    if the rubric leaves no room for a document (E-CONFIG-CONTEXT).
    """

    def __init__(
        self,
        checkpoint: Path,
        config: ModelConfig,
        rubric: Rubric,
        max_tokens: int,
        reasoning: Reasoning,
    ) -> None:
        found = model_tokenizer(checkpoint, config.vocab_size)
        if found is None:
            raise CheckpointError(
                "the model has no tokenizer, so it cannot read a document",
                where=checkpoint,
                expected="tokenizer.json beside the weights",
                code="E-CHECKPOINT-SHAPE",
            )
        self._tokenizer = load_tokenizer(found)
        self._chat = Chat(checkpoint, self._tokenizer, CONVERSATION_DATE)
        self._options = {"enable_thinking": reasoning != "none"}
        self._before, self._after = self._render(checkpoint, rubric.text())
        self._max_tokens = max_tokens
        self._has_reason = rubric.has_reason
        num_fixed = len(self._ids(""))
        self._max_document_tokens = require_room(max_tokens, num_fixed)
        self.to_final = tuple(self._tokenizer.encode_with_specials(_END_OF_THOUGHTS))
        self.stop_ids = frozenset(end_ids(checkpoint, config))
        if not self.stop_ids:
            raise CheckpointError(
                "the model has no EOS id, so its answers have no end",
                where=checkpoint,
                expected="eos_token_id in config.json or generation_config.json",
                code="E-CHECKPOINT-CONFIG",
            )
        self.facts = {
            "prompt": PROMPT_VERSION,
            "prompt_text_sha256": sha256_json([self._before, self._after]),
            "tokenizer": self._tokenizer.fingerprint,
            "stop_ids": sorted(self.stop_ids),
        }

    def _render(self, checkpoint: Path, rubric: str) -> list[str]:
        """The text of a conversation before and after the document."""
        user = {"role": "user", "content": _DOCUMENT}
        try:
            messages = [{"role": "system", "content": rubric}, user]
            text = self._chat.render(messages, options=self._options)
        except TokenizerError as error:
            if error.code != "E-TOKENIZER-CHAT":
                raise
            only = {"role": "user", "content": f"{rubric}\n\n{_DOCUMENT}"}
            text = self._chat.render([only], options=self._options)
        parts = text.split(_DOCUMENT)
        if len(parts) != 2:
            raise CheckpointError(
                "the chat template does not write the user's message once",
                where=checkpoint,
                found=f"{len(parts) - 1} times",
                expected="once",
                do="use a model with a chat template, or an oracle of kind http",
                code="E-CHECKPOINT-TEMPLATE",
            )
        return parts

    def prompt(self, text: str) -> tuple[list[int], bool]:
        """The prompt tokens for a document, and whether the end of the document was cut."""
        room = self._max_document_tokens
        # Count tokens before the template's text is added: a long run of one character would take
        # minutes if it was encoded whole.
        ids = self._tokenizer.encode_long(text, room + 1)
        is_cut = len(ids) > room
        read = self._tokenizer.decode(ids[:room]).rstrip("\ufffd") if is_cut else text
        while True:
            prompt = self._ids(read.join(fenced(text)))
            excess = len(prompt) - self._max_tokens
            if excess <= 0:
                return prompt, is_cut
            # Tokens at the seams differ, so a document that fits alone may be a little too long.
            is_cut = True
            room = max(0, min(room, len(ids)) - excess)
            read = self._tokenizer.decode(ids[:room]).rstrip("\ufffd")

    def decode(self, tokens: list[int]) -> str:
        """The text of a prompt, with its control tokens."""
        return self._tokenizer.decode(tokens)

    def _ids(self, document: str) -> list[int]:
        ordinary = self._chat.as_ordinary_text(document)
        return self._chat.encode(f"{self._before}{ordinary}{self._after}")

    def is_reasoning(self, tokens: Sequence[int]) -> bool:
        """Whether an answer that begins with these tokens is still in its reasoning."""
        text = self._answer(tokens)
        return text.lstrip().startswith("<think>") and "</think>" not in text

    def read(
        self, tokens: Sequence[int], has_stopped: bool, extract_embedded: bool, scale: Scale
    ) -> OracleResult:
        """Read the result from the tokens of an answer, without the stop token; `has_stopped` is
        false if the model reached the token limit."""
        thoughts, answer = without_thoughts(self._answer(tokens))
        reason = "stop" if has_stopped else "length"
        said = read_scores(answer, extract_embedded, scale, self._has_reason)
        if said.scores is not None:
            embedded = said.is_embedded
            return OracleResult(said.scores, "", reason, len(tokens), embedded, reason=said.reason)
        if has_stopped:
            empty = "reasoning_only" if thoughts else "empty_content"
            reason = "parse_failed" if answer.strip() else empty
        return OracleResult(None, answer or thoughts, reason, len(tokens))

    def _answer(self, tokens: Sequence[int]) -> str:
        """The text of an answer, with the tag that the template opened before it."""
        opened = "<think>" if self._after.rstrip().endswith("<think>") else ""
        return opened + self._tokenizer.continuation([], tokens)
