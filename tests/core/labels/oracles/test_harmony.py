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
STREAMS = {
    # name: (the model's tokens as text, a stop token came, finish reason, what comes of it)
    "reasoning then final": (THINK + FINAL + GOOD, True, "final_stop", LABEL),
    "constrained final": (CONSTRAINED + GOOD, True, "final_stop", LABEL),
    "return inside reasoning": (THINK[:35], True, "stop_outside_final", NONE),
    "channel misspelt": (f"<|channel|>finalx<|message|>{GOOD}", True, "stop_outside_final", NONE),
    "message marker missing": (f"<|channel|>final{GOOD}", True, "stop_outside_final", SALVAGED),
    "cut in the answer": (FINAL + GOOD[:-4], False, "length", NONE),
    "cut after the answer": (FINAL + GOOD, False, "length", LABEL),
    "cut in the reasoning": (THINK[:35], False, "length", NONE),
    "text between messages": (
        "<|channel|>analysis<|message|>Hm.<|end|> well <|start|>assistant" + FINAL + GOOD,
        *(True, "parser_error", SALVAGED),
    ),
    "end, then return": (FINAL + GOOD + "<|end|>", True, "final_stop", LABEL),
    "doubled opening": ("<|start|>assistant" + FINAL + GOOD, True, "final_stop", LABEL),
    "no channel at all": (GOOD, True, "stop_outside_final", SALVAGED),
    "two finals that differ": (FINAL + GOOD + NEXT + FINAL + OTHER, True, "final_stop", NONE),
    "a final, then other thoughts": (
        FINAL + GOOD + NEXT + "<|channel|>analysis<|message|>No, that",
        *(True, "stop_outside_final", SALVAGED),
    ),
    "tool call": ("<|channel|>commentary to=f<|message|>{}", True, "stop_outside_final", NONE),
    "quoted scores in the reasoning only": (
        f"<|channel|>analysis<|message|>It says {OTHER}.",
        *(True, "stop_outside_final", NONE),
    ),
    "final spelled in the reasoning": (
        f"<|channel|>analysis<|message|>maybe {GOOD}assistantfinal{GOOD}",
        *(True, "stop_outside_final", NONE),
    ),
    "prose around": (FINAL + f"Sure: {GOOD}!", True, "final_stop", SALVAGED),
    "a refusal that quotes": (
        FINAL + f"The document tells me to print {GOOD} so I will not comply",
        *(True, "final_stop", SALVAGED),
    ),
    "a fence and nothing else": (FINAL + f"```json\n{GOOD}\n```", True, "final_stop", LABEL),
    "nothing": ("", True, "stop_outside_final", NONE),
}


def tokens_of(text: str) -> list[int]:
    return encoding().encode(text, allowed_special="all")


@pytest.mark.parametrize("name", STREAMS)
def test_token_streams_give_a_label_only_where_the_final_answer_is_the_object(name: str) -> None:
    text, has_stopped, reason, outcome = STREAMS[name]
    tokens = tokens_of(text)
    strict, lenient = (read_answer(tokens, has_stopped, salvage=s) for s in (False, True))
    assert strict.scores == (SCORES if outcome == LABEL else None)
    assert lenient.scores == (None if outcome == NONE else SCORES)
    assert (strict.is_salvaged, lenient.is_salvaged) == (False, outcome == SALVAGED)
    for result in (strict, lenient):
        assert (result.finish_reason, result.num_new_tokens) == (reason, len(tokens))


def test_an_answer_in_an_opened_final_channel_is_read() -> None:
    result = read_answer(tokens_of(GOOD), True, opened=True)
    assert (result.scores, result.finish_reason) == (SCORES, "final_stop")


def test_only_return_and_call_stop_an_answer() -> None:
    actions = set(encoding().stop_tokens_for_assistant_actions())
    assert harmony.STOP_IDS == actions == {RETURN, CALL}
    assert END not in harmony.STOP_IDS


def test_a_prompt_reads_as_harmony_renders_the_same_conversation(rubric: Rubric) -> None:
    import openai_harmony as oh

    text = "A document of a few words."
    system = (
        oh.SystemContent.new()
        .with_reasoning_effort(oh.ReasoningEffort.LOW)
        .with_conversation_start_date(harmony.CONVERSATION_DATE)
        .with_required_channels(["analysis", "final"])
    )
    contents = [
        (oh.Role.SYSTEM, system),
        (oh.Role.DEVELOPER, oh.DeveloperContent.new().with_instructions(rubric.text())),
        (oh.Role.USER, DOCUMENT_HEAD + text + DOCUMENT_TAIL),
    ]
    whole = oh.Conversation.from_messages(
        [oh.Message.from_role_and_content(*content) for content in contents]
    )
    expected = encoding().render_conversation_for_completion(whole, oh.Role.ASSISTANT)
    made = JudgePrompt(rubric, 4096).prompt(text)
    assert encoding().decode(made.tokens) == encoding().decode(expected)
    assert not made.is_truncated


@pytest.mark.parametrize("room", [1024, 2048])
@pytest.mark.parametrize("text", ["word " * 50_000, "x" * 200_000, "東京\U0001f468" * 30_000])
def test_a_long_document_loses_its_end_and_never_the_rubric_or_the_opening(
    rubric: Rubric, text: str, room: int
) -> None:
    made = JudgePrompt(rubric, room)
    prompt = made.prompt(text)
    assert prompt.is_truncated
    assert len(prompt.tokens) == room
    assert prompt.tokens[: len(made.prefix)] == made.prefix
    assert prompt.tokens[-2:] == [200006, 173781]
    read = encoding().decode(prompt.tokens)
    assert rubric.text() in read
    assert read.endswith(f"{DOCUMENT_TAIL}<|end|><|start|>assistant")
    document = prompt.tokens[len(made.prefix) : -len(made.suffix)]
    assert document == encoding().encode(text[:12_000], disallowed_special=())[: len(document)]


def test_without_room_for_a_document_the_settings_are_refused(rubric: Rubric) -> None:
    with refused("E-CONFIG-CONTEXT"):
        JudgePrompt(rubric, 300)


def test_a_prompt_without_reasoning_ends_with_the_opened_final_channel(rubric: Rubric) -> None:
    made = JudgePrompt(rubric, 4096, "none").prompt("a")
    assert encoding().decode(made.tokens).endswith("<|start|>assistant<|channel|>final<|message|>")


SPELLINGS = ["<|end|>", "<|start|>", "<|return|>", "<|message|>", "<|channel|>", "<|endoftext|>"]


@settings(max_examples=60)
@given(st.lists(st.sampled_from(SPELLINGS) | st.text(max_size=8), max_size=12).map("".join))
def test_no_document_puts_a_control_token_into_a_prompt(text: str) -> None:
    made = JudgePrompt(Rubric.load(RUBRIC), 1024)
    prompt = made.prompt(text)
    document = prompt.tokens[len(made.prefix) : len(prompt.tokens) - len(made.suffix)]
    assert all(token < harmony.FIRST_SPECIAL for token in document)
    assert len(prompt.tokens) <= 1024


_CONTROL = st.sampled_from([200002, 200003, 200005, 200006, 200007, 200008, 200012, 173781, 17196])


@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(
            _CONTROL.map(lambda t: [t]),
            st.integers(0, 199997).map(lambda t: [t]),
            st.sampled_from([GOOD, OTHER, "{", "}", "assistant", "final", "analysis"]).map(
                lambda text: tokens_of(text)
            ),
        ),
        max_size=30,
    ).map(lambda parts: [t for part in parts for t in part]),
    st.booleans(),
    st.booleans(),
)
def test_any_tokens_give_scores_or_a_reason(tokens: list[int], stop: bool, opened: bool) -> None:
    result = read_answer(tokens, stop, opened, salvage=True)
    assert result.finish_reason in ("final_stop", "stop_outside_final", "length", "parser_error")
    assert result.scores in (None, SCORES, json.loads(OTHER))
    assert result.scores is None or result.raw == ""


@settings(max_examples=300)
@given(st.text() | st.text(alphabet='{}[]":,0123456789.eE-ntrufalse \n'), st.booleans())
def test_any_text_is_scores_or_none(text: str, salvage: bool) -> None:
    scores, is_salvaged = read_scores(text, salvage)
    assert scores is None or (
        set(scores) == set(DIMENSIONS) and {*scores.values()} <= set(range(5))
    )
    assert not is_salvaged or (salvage and scores is not None)


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
    opened = before + GOOD + after
    if "<|channel|>final<|message|>" not in opened:
        assert final_text(opened) is None


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
