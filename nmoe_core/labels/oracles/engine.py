"""The `engine` oracle: runs weights of any family that the engine reads in this process, greedily,
with continuous batching.

gpt-oss gets its prompt in Harmony, other families in their own chat template. A document enters the
batch as soon as a slot is free. Reasoning has a token budget. When the budget is used up, the
oracle ends the reasoning for the model, so the model always answers. The checkpoint is loaded at
the first question; checking whether labels are current only needs the checkpoint's digest.
"""

from __future__ import annotations

import functools
import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmoe_core.base.errors import CheckpointError
from nmoe_core.base.settings import expert_fingerprints
from nmoe_core.config.rubric import Rubric
from nmoe_core.labels.oracle import (
    RETRY_TEMPERATURE,
    Keep,
    MeasuredOracle,
    OracleResult,
    Question,
    Reply,
)
from nmoe_core.labels.oracles.harmony import JudgePrompt
from nmoe_core.labels.scores import Scale
from nmoe_core.text.harmony import VOCAB_SIZE

if TYPE_CHECKING:
    from nmoe_core.config.quality import EngineOracleTable
    from nmoe_core.engine import BatchedGenerator
    from nmoe_core.engine.weights.config import ModelConfig
    from nmoe_core.labels.oracles.template_prompt import TemplatePrompt

# An answer with five keys and grades has about 40 tokens; the rest leaves room for white space.
FINAL_TOKENS = 128
REASON_TOKENS = 256  # more, for a reason before the grades
_PUBLISHED = {(24, 2880, 32): "gpt-oss-20b", (36, 2880, 128): "gpt-oss-120b"}


@dataclass(slots=True)
class _Answer:
    """An unfinished answer: its tokens, and the forced tokens that come next."""

    index: int
    question: Question
    is_truncated: bool
    prompt: JudgePrompt | TemplatePrompt
    max_reasoning: int
    tokens: list[int] = field(default_factory=list)
    forced: deque[int] = field(default_factory=deque)

    def take(self, token: int) -> int:
        """The next token: the model's token or, if the reasoning must end, a forced token
        instead."""
        is_spent = len(self.tokens) == self.max_reasoning and self.prompt.is_reasoning(self.tokens)
        if is_spent and token not in self.prompt.stop_ids:
            self.forced.extend(self.prompt.to_final)
        if self.forced:
            token = self.forced.popleft()
        self.tokens.append(token)
        return token


class EngineOracle(MeasuredOracle):
    """Labels with a checkpoint, through the project's engine.

    Raises CheckpointError if the checkpoint is missing, a gpt-oss without gpt-oss's vocabulary, or
    another model that `TemplatePrompt` refuses, and ConfigError if `max_ctx` is too small for
    `max_new`, the rubric and a document (E-CONFIG-CONTEXT).
    """

    def __init__(
        self,
        checkpoint: Path,
        table: EngineOracleTable,
        rubric: Rubric,
        extract_embedded: bool = False,
    ) -> None:
        from nmoe_core.engine.weights.checkpoint import open_checkpoint
        from nmoe_core.engine.weights.weight_files import checkpoint_digest

        self._checkpoint = checkpoint
        self._table = table
        self._extract_embedded = extract_embedded
        with open_checkpoint(checkpoint) as opened:
            config = opened.config
        self._prompt = _prompt(checkpoint, config, rubric, table)
        self._final_tokens = FINAL_TOKENS + (REASON_TOKENS if rubric.has_reason else 0)
        facts: dict[str, Any] = {
            "backend": "engine",
            "weights": checkpoint_digest(checkpoint),
            **self._prompt.facts,
            "rubric": rubric.hash,
            "max_ctx": table.max_ctx,
            "max_new": table.max_new,
            "final_tokens": self._final_tokens,
            "reasoning": table.reasoning,
            "dtype": table.dtype,
            **expert_fingerprints(table.moe_backend),
            "temperature": 0,
            "retry_temperature": RETRY_TEMPERATURE,
            # Use the key's old name: facts are hashed into the scorer's version, which must not
            # change.
            **({"salvage": True} if extract_embedded else {}),
        }
        super().__init__(model_name(config), facts, Scale.of(rubric))

    def label(
        self, questions: Iterable[Question], keep: Keep | None = None
    ) -> Iterator[tuple[int, OracleResult]]:
        """Yield results as answers end; reads more questions as slots become free."""
        weights = self._checkpoint, self.facts["weights"]
        generator = load_generator(*weights, self._table)  # pyright: ignore[reportArgumentType]
        # Limit reasoning so that there is room for an answer.
        room = max(0, self._table.max_new - self._final_tokens - len(self._prompt.to_final))
        source = enumerate(questions)
        running = dict[int, _Answer]()
        try:
            while True:
                # Queue twice the batch size, so that a free slot is filled in the same step.
                while len(running) < 2 * self._table.batch_size and (item := next(source, None)):
                    tokens, is_truncated = self._prompt.prompt(item[1].text)
                    seq_id = generator.add(tokens, self._table.max_new)
                    running[seq_id] = _Answer(*item, is_truncated, self._prompt, room)
                if not running:
                    return
                for i, reply in self._step(generator, running):
                    if keep is not None:
                        keep(i, reply)
                    yield i, self._result(reply)
        finally:
            for seq_id in running:
                generator.cancel(seq_id)

    def _step(
        self, generator: BatchedGenerator, running: dict[int, _Answer]
    ) -> Iterator[tuple[int, Reply]]:
        """Compute one token of each running answer; yield the replies that end with it."""
        from nmoe_core.engine import Sampling
        from nmoe_core.engine.generation.sampling import sample

        stepped = generator.step()
        assert stepped is not None
        logits, seq_ids = stepped
        likeliest = logits.argmax(-1).tolist()
        for row, seq_id in enumerate(seq_ids):
            answer = running[seq_id]
            token = likeliest[row]
            if answer.question.is_drawn:
                sampling = Sampling(RETRY_TEMPERATURE, seed=answer.question.seed())
                token = sample(logits[row], sampling, len(answer.tokens))
            token = answer.take(token)
            is_last = token in self._prompt.stop_ids or len(answer.tokens) == self._table.max_new
            generator.update(seq_id, token, finished=is_last)
            if is_last:
                del running[seq_id]
                yield answer.index, self._reply(answer)

    def shown(self, question: Question) -> dict[str, Any]:
        """What the model reads for a question: the `prompt`, its token `ids`, and the settings of
        the answer. The model is not loaded."""
        ids, is_truncated = self._prompt.prompt(question.text)
        prompt = {"prompt": self._prompt.decode(ids), "ids": ids, "is_truncated": is_truncated}
        return {**prompt, "max_new": self._table.max_new, **_sent(question)}

    def _reply(self, answer: _Answer) -> Reply:
        said = {"tokens": answer.tokens, "is_truncated": answer.is_truncated}
        num_new = len(answer.tokens)
        return Reply(json.dumps(said), sent=_sent(answer.question), tokens_out=num_new)

    def read(self, reply: Reply) -> OracleResult | None:
        return self._result(reply) if reply.body else None  # empty: erased by a takedown

    def _result(self, reply: Reply) -> OracleResult:
        said = json.loads(reply.body)
        tokens = said["tokens"]
        has_stopped = bool(tokens) and tokens[-1] in self._prompt.stop_ids
        answer = tokens[:-1] if has_stopped else tokens
        result = self._prompt.read(answer, has_stopped, self._extract_embedded, self.scale)
        return replace(result, is_truncated=said["is_truncated"])


def _prompt(
    checkpoint: Path, config: ModelConfig, rubric: Rubric, table: EngineOracleTable
) -> JudgePrompt | TemplatePrompt:
    """The prompt of the model's family."""
    from nmoe_core.engine.weights.families import GPT_OSS
    from nmoe_core.labels.oracles.template_prompt import TemplatePrompt

    max_tokens = table.max_ctx - table.max_new
    if config.family != GPT_OSS:
        return TemplatePrompt(checkpoint, config, rubric, max_tokens, table.reasoning)
    if config.vocab_size < VOCAB_SIZE:
        raise CheckpointError(
            "the model does not have the vocabulary of gpt-oss",
            where=checkpoint,
            found=f"{config.vocab_size} tokens",
            expected=VOCAB_SIZE,
            code="E-CHECKPOINT-SHAPE",
        )
    return JudgePrompt(rubric, max_tokens, table.reasoning)


def _sent(question: Question) -> dict[str, Any]:
    temperature = RETRY_TEMPERATURE if question.is_drawn else 0
    return {"temperature": temperature, "seed": question.seed()}


def model_name(config: ModelConfig) -> str:
    """`gpt-oss-20b` or `gpt-oss-120b` if the shape matches; other models are named by their family
    and dimensions."""
    shape = (config.num_hidden_layers, config.hidden_size, config.num_experts)
    family = config.family.model_type.replace("_", "-")
    named = f"{family}-shaped-{'x'.join(map(str, shape))}"
    return _PUBLISHED.get(shape, named)


@functools.lru_cache(maxsize=1)
def load_generator(checkpoint: Path, digest: str, table: EngineOracleTable) -> BatchedGenerator:
    """Load the model once per process; another `digest` loads the weights again."""
    import torch

    from nmoe_core.engine import BatchedGenerator, Transformer
    from nmoe_core.engine.backend import own_device

    dtype = getattr(torch, table.dtype)
    model = Transformer.from_checkpoint(
        checkpoint, device=own_device(table.device), dtype=dtype, moe_backend=table.moe_backend
    )
    return BatchedGenerator(model, table.max_ctx, table.batch_size)
