from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe_core.config.rubric import Rubric
from nmoe_core.labels.oracles import harmony
from nmoe_core.labels.oracles.dialects import final_text
from nmoe_core.labels.oracles.harmony import (
    CALL,
    DOCUMENT_HEAD,
    DOCUMENT_TAIL,
    END,
    RETURN,
    JudgePrompt,
    encoding,
    read_answer,
)
from nmoe_core.labels.scores import DIMENSIONS, read_scores
from tests.core.labels.oracles.server import GOOD, OTHER, SCORES
from tests.core.quality import RUBRIC
from tests.refusals import refused

THINK = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CONSTRAINED = "<|channel|>final <|constrain|>json<|message|>"
NEXT = "<|end|><|start|>assistant"

# What comes of an answer: a label, one only when salvaging, or none.
LABEL, SALVAGED, NONE = "label", "salvaged", "none"
ANALYSIS = "<|channel|>analysis<|message|>"
STREAMS = {
    # the model's tokens as text: (finish reason, what comes of it)
    THINK + FINAL + GOOD: ("final_stop", LABEL),
    CONSTRAINED + GOOD: ("final_stop", LABEL),
    FINAL + GOOD + "<|end|>": ("final_stop", LABEL),
    "<|start|>assistant" + FINAL + GOOD: ("final_stop", LABEL),
    FINAL + f"```json\n{GOOD}\n```": ("final_stop", LABEL),
    FINAL + GOOD + NEXT + FINAL + OTHER: ("final_stop", NONE),
    FINAL + f"Sure: {GOOD}!": ("final_stop", SALVAGED),
    FINAL + f"The document tells me to print {GOOD} so I will not comply": ("final_stop", SALVAGED),
    THINK[:35]: ("stop_outside_final", NONE),
    f"<|channel|>finalx<|message|>{GOOD}": ("stop_outside_final", NONE),
    f"<|channel|>final{GOOD}": ("stop_outside_final", SALVAGED),
    GOOD: ("stop_outside_final", SALVAGED),
    FINAL + GOOD + NEXT + f"{ANALYSIS}No, that": ("stop_outside_final", SALVAGED),
    "<|channel|>commentary to=f<|message|>{}": ("stop_outside_final", NONE),
    f"{ANALYSIS}It says {OTHER}.": ("stop_outside_final", NONE),
    f"{ANALYSIS}maybe {GOOD}assistantfinal{GOOD}": ("stop_outside_final", NONE),
    "": ("stop_outside_final", NONE),
    f"{ANALYSIS}Hm.<|end|> well <|start|>assistant{FINAL}{GOOD}": ("parser_error", SALVAGED),
    FINAL + GOOD[:-4]: ("length", NONE),
    f"{THINK}{FINAL}{GOOD}\n": ("length", LABEL),
    THINK[:34]: ("length", NONE),
}


def tokens_of(text: str) -> list[int]:
    return encoding().encode(text, allowed_special="all")


@pytest.mark.parametrize("text", STREAMS)
def test_token_streams_give_a_label_only_where_the_final_answer_is_the_object(text: str) -> None:
    tokens, (reason, outcome) = tokens_of(text), STREAMS[text]
    has_stopped = reason != "length"
    strict, lenient = (read_answer(tokens, has_stopped, salvage=s) for s in (False, True))
    assert strict.scores == (SCORES if outcome == LABEL else None)
    assert lenient.scores == (None if outcome == NONE else SCORES)
    assert (strict.is_salvaged, lenient.is_salvaged) == (False, outcome == SALVAGED)
    for result in (strict, lenient):
        assert (result.finish_reason, result.num_new_tokens) == (reason, len(tokens))


def test_an_opened_final_channel_is_read_and_only_return_and_call_stop_an_answer() -> None:
    result = read_answer(tokens_of(GOOD), True, opened=True)
    assert (result.scores, result.finish_reason) == (SCORES, "final_stop")
    actions = set(encoding().stop_tokens_for_assistant_actions())
    assert harmony.STOP_IDS == actions == {RETURN, CALL}
    assert END not in harmony.STOP_IDS


def test_a_prompt_reads_as_harmony_renders_the_same_conversation(rubric: Rubric) -> None:
    import openai_harmony as oh

    text = "A document of a few words."
    system = oh.SystemContent.new().with_reasoning_effort(oh.ReasoningEffort.LOW)
    system = system.with_conversation_start_date(harmony.CONVERSATION_DATE)
    system = system.with_required_channels(["analysis", "final"])
    contents = [
        (oh.Role.SYSTEM, system),
        (oh.Role.DEVELOPER, oh.DeveloperContent.new().with_instructions(rubric.text())),
        (oh.Role.USER, DOCUMENT_HEAD + text + DOCUMENT_TAIL),
    ]
    whole = oh.Conversation.from_messages(
        [oh.Message.from_role_and_content(*content) for content in contents]
    )
    expected = encoding().render_conversation_for_completion(whole, oh.Role.ASSISTANT)
    tokens, is_truncated = JudgePrompt(rubric, 4096).prompt(text)
    assert encoding().decode(tokens) == encoding().decode(expected)
    assert not is_truncated


@pytest.mark.parametrize("room", [1024, 2048])
@pytest.mark.parametrize("text", ["word " * 50_000, "x" * 200_000, "東京\U0001f468" * 30_000])
def test_a_long_document_loses_its_end_and_never_the_rubric_or_the_opening(
    rubric: Rubric, text: str, room: int
) -> None:
    made = JudgePrompt(rubric, room)
    tokens, is_truncated = made.prompt(text)
    assert is_truncated
    assert len(tokens) == room
    assert tokens[: len(made.prefix)] == made.prefix
    assert tokens[-2:] == [200006, 173781]
    read = encoding().decode(tokens)
    assert rubric.text() in read
    assert read.endswith(f"{DOCUMENT_TAIL}<|end|><|start|>assistant")
    document = tokens[len(made.prefix) : -len(made.suffix)]
    assert document == encoding().encode(text[:12_000], disallowed_special=())[: len(document)]


def test_settings_open_the_final_channel_and_must_leave_room_for_a_document(rubric: Rubric) -> None:
    tokens, _ = JudgePrompt(rubric, 4096, "none").prompt("a")
    assert encoding().decode(tokens).endswith("<|start|>assistant<|channel|>final<|message|>")
    with refused("E-CONFIG-CONTEXT"):
        JudgePrompt(rubric, 300)


SPELLINGS = ["<|end|>", "<|start|>", "<|return|>", "<|message|>", "<|channel|>", "<|endoftext|>"]


@settings(max_examples=60)
@given(st.lists(st.sampled_from(SPELLINGS) | st.text(max_size=8), max_size=12).map("".join))
def test_no_document_puts_a_control_token_into_a_prompt(text: str) -> None:
    made = JudgePrompt(Rubric.load(RUBRIC), 1024)
    tokens, _ = made.prompt(text)
    document = tokens[len(made.prefix) : len(tokens) - len(made.suffix)]
    assert all(token < harmony.FIRST_SPECIAL for token in document)
    assert len(tokens) <= 1024


_CONTROL = st.sampled_from([200002, 200003, 200005, 200006, 200007, 200008, 200012, 173781, 17196])
_WORDS = st.sampled_from([GOOD, OTHER, "{", "}", "assistant", "final", "analysis"]).map(tokens_of)
_TOKENS = (_CONTROL | st.integers(0, 199997)).map(lambda token: [token]) | _WORDS


@settings(max_examples=200)
@given(st.lists(_TOKENS, max_size=30), st.booleans(), st.booleans())
def test_any_tokens_give_scores_or_a_reason(
    parts: list[list[int]], stop: bool, opened: bool
) -> None:
    tokens = [token for part in parts for token in part]
    result = read_answer(tokens, stop, opened, salvage=True)
    assert result.finish_reason in ("final_stop", "stop_outside_final", "length", "parser_error")
    assert result.scores in (None, SCORES, json.loads(OTHER))
    assert result.scores is None or result.raw == ""


@given(
    st.text(alphabet=st.characters(exclude_characters="{}"), min_size=1),
    st.text(alphabet=st.characters(exclude_characters="{}")),
    st.lists(st.integers(0, 4), min_size=5, max_size=5),
)
def test_scores_among_words_are_found_on_request_alone_and_two_objects_are_none(
    before: str, after: str, grades: list[int]
) -> None:
    scores = dict(zip(DIMENSIONS, grades))
    text = before + json.dumps(scores) + after
    assert read_scores(text, True)[0] == scores
    assert read_scores(f"{text} {OTHER}", True) == (None, False)
    is_alone = not before.strip(" \t\r\n") and not after.strip(" \t\r\n")
    assert read_scores(text) == (scores if is_alone else None, False)


FENCES = {
    f"```json\n{GOOD}\n```": True,
    f"```\n{GOOD}\n```": True,
    f"\n```JSON\n{json.dumps(SCORES, indent=2)}\n```\n": True,
    f"```json\n{GOOD}\n```\nThat is all.": False,
    f"Here:\n```json\n{GOOD}\n```": False,
    f"```python\n{GOOD}\n```": False,
    f"```json\n{GOOD}\n```\n```json\n{GOOD}\n```": False,
    f"```json\n{GOOD}": False,
}


@pytest.mark.parametrize("text", FENCES)
def test_a_fence_around_the_object_alone_is_a_whole_answer(text: str) -> None:
    assert read_scores(text) == (SCORES if FENCES[text] else None, False)


_WRAPPERS = [
    *("<think>", "</think>", "<thinking>", "</thinking>", "<reasoning>", "[THINK]", "[/THINK]"),
    *("◁think▷", "◁/think▷", "<|channel|>", "analysis", "final", "<|message|>", "<|end|>"),
    *("<|start|>assistant", "assistantfinal", "assistantanalysis", "<final>", "</final>"),
    *("First guess", "maybe", "but wait,", "so I will not comply", "Answer:", "```", "```json\n"),
    *("\n", " ", "\\boxed{", "}", '"', "<answer>", "</answer>", "#### "),
]


@settings(max_examples=400)
@given(
    st.lists(st.sampled_from(_WRAPPERS), max_size=6).map("".join),
    st.lists(st.sampled_from(_WRAPPERS), max_size=6).map("".join),
)
def test_no_wrapping_of_an_object_in_reasoning_is_a_label(before: str, after: str) -> None:
    text = before + GOOD + after
    inside = text.strip().removesuffix("```").strip()
    is_fenced = inside.removeprefix("```json\n").removeprefix("```").strip() == GOOD
    scores, is_salvaged = read_scores(text)
    assert not is_salvaged
    if not is_fenced:
        assert scores is None, text
    # The same as a completion in text: only a delimited final message is read.
    if FINAL not in text:
        assert final_text(text) is None


def test_the_vocabulary_needs_no_network(tmp_path: Path) -> None:
    code = (
        "from nmoe_core.labels.oracles.harmony import encoding; "
        "print(encoding().encode('hello world', disallowed_special=()))"
    )
    keys = ("TIKTOKEN_CACHE_DIR", "TIKTOKEN_ENCODINGS_BASE")
    environment = {k: v for k, v in os.environ.items() if k not in keys}
    environment |= {"NMOE_CACHE_DIR": str(tmp_path), "https_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [24912, 2375]
