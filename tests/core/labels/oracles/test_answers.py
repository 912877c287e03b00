import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe_core.labels.oracles import harmony
from nmoe_core.labels.oracles.dialects import final_text
from nmoe_core.labels.oracles.harmony import read_answer
from nmoe_core.labels.scores import QUALITY, read_scores
from nmoe_core.text.harmony import CALL, END, RETURN, encoding
from tests.core.labels.oracles.server import (
    ANALYSIS,
    FINAL,
    GOOD,
    NEXT,
    OTHER,
    SCORES,
    JudgeServer,
    completion,
    text_completion,
    tokens_of,
)

THINK = f"{ANALYSIS}Hm, not {OTHER}.{NEXT}"
QUOTED = f"The document tells me to print {GOOD} so I will not comply"

# What comes of an answer: a label, one only when salvaging, or none.
LABEL, SALVAGED, NONE = "label", "salvaged", "none"
ANSWERS = {
    # the model's tokens as text: (finish reason of the engine, what comes of it there)
    THINK + FINAL + GOOD: ("final_stop", LABEL),
    f"<|channel|>final <|constrain|>json<|message|>{GOOD}": ("final_stop", LABEL),
    FINAL + GOOD + "<|end|>": ("final_stop", LABEL),
    FINAL + GOOD + "<|return|>": ("final_stop", LABEL),
    "<|start|>assistant" + FINAL + GOOD: ("final_stop", LABEL),
    FINAL + f"```json\n{GOOD}\n```": ("final_stop", LABEL),
    FINAL + OTHER + NEXT + FINAL + GOOD: ("final_stop", NONE),
    FINAL + GOOD.replace("4", "9"): ("final_stop", NONE),
    FINAL + f"Sure: {GOOD}!": ("final_stop", SALVAGED),
    FINAL + QUOTED: ("final_stop", SALVAGED),
    THINK[:35]: ("stop_outside_final", NONE),
    f"<|channel|>finalx<|message|>{GOOD}": ("stop_outside_final", NONE),
    f"<|channel|>final{GOOD}": ("stop_outside_final", SALVAGED),
    GOOD: ("stop_outside_final", SALVAGED),
    f"analysis{GOOD}": ("stop_outside_final", SALVAGED),
    FINAL + GOOD + NEXT + f"{ANALYSIS}No, that": ("stop_outside_final", SALVAGED),
    "<|channel|>commentary to=f<|message|>{}": ("stop_outside_final", NONE),
    f"{ANALYSIS}It says {GOOD}.": ("stop_outside_final", NONE),
    f"{ANALYSIS}It says {FINAL}{GOOD}": ("stop_outside_final", NONE),
    f"{ANALYSIS}maybe {GOOD}assistantfinal{GOOD}": ("stop_outside_final", NONE),
    f"analysisNot {OTHER}.assistantfinal{GOOD}": ("stop_outside_final", NONE),
    "": ("stop_outside_final", NONE),
    f"{ANALYSIS}Hm.<|end|> well <|start|>assistant{FINAL}{GOOD}": ("parser_error", SALVAGED),
    f"{ANALYSIS}It says {FINAL}{GOOD}<|end|> and so on": ("parser_error", SALVAGED),
    FINAL + GOOD[:-4]: ("length", NONE),
    f"{THINK}{FINAL}{GOOD}\n": ("length", LABEL),
    THINK[:34]: ("length", NONE),
}


@pytest.mark.parametrize("text", ANSWERS)
def test_only_a_final_answer_that_is_the_object_is_a_label(server: JudgeServer, text: str) -> None:
    tokens, (reason, outcome) = tokens_of(text.removesuffix("<|return|>")), ANSWERS[text]
    has_stopped = reason != "length"
    strict, lenient = (read_answer(tokens, has_stopped, extract_embedded=s) for s in (False, True))
    assert strict.scores == (SCORES if outcome == LABEL else None)
    assert lenient.scores == (None if outcome == NONE else SCORES)
    assert (strict.is_salvaged, lenient.is_salvaged) == (False, outcome == SALVAGED)
    for result in (strict, lenient):
        assert (result.finish_reason, result.num_new_tokens) == (reason, len(tokens))

    server.always(text_completion(text, reason="stop" if has_stopped else "length"))
    result = server.ask_one(api="completions")
    of_final = "stop" if outcome == LABEL else "parse_failed"
    reasons = {"final_stop": of_final, "length": "length"}
    expected = reasons.get(reason, "reasoning_only" if text else "empty_content")
    assert (result.finish_reason, result.is_salvaged) == (expected, False)
    assert result.scores == strict.scores
    assert result.raw in text.replace(NEXT + FINAL, "")


def test_an_opened_final_channel_is_read_to_return_or_call(server: JudgeServer) -> None:
    result = read_answer(tokens_of(GOOD), True, opened=True)
    assert (result.scores, result.finish_reason) == (SCORES, "final_stop")
    actions = set(encoding().stop_tokens_for_assistant_actions())
    assert harmony.STOP_IDS == actions == {RETURN, CALL}
    assert END not in harmony.STOP_IDS
    for reply, scores, reason in (
        (text_completion(GOOD + "<|return|>"), SCORES, "stop"),
        (text_completion(f"{GOOD}{NEXT}{FINAL}{OTHER}"), None, "parse_failed"),
        (text_completion(f"{GOOD}<|message|>"), None, "reasoning_only"),
        (text_completion(f"x {GOOD}"), None, "parse_failed"),
        (text_completion(None), None, "empty_content"),
        (completion(GOOD), None, "not_a_completion"),
    ):
        server.always(reply)
        result = server.ask_one(api="completions", reasoning_effort="none")
        assert (result.scores, result.finish_reason) == (scores, reason)


@pytest.mark.parametrize(
    ("reply", "reason", "raw"),
    [
        ({"content": QUOTED}, "parse_failed", QUOTED),
        ({"content": GOOD[:-7]}, "parse_failed", GOOD[:-7]),
        ({"content": None}, "empty_content", ""),
        ({"content": "  "}, "empty_content", ""),
        ({"content": None, "message": {"reasoning_content": "hm"}}, "reasoning_only", "hm"),
        ({"content": "", "message": {"reasoning": GOOD}}, "reasoning_only", GOOD),
        ({"content": GOOD[:9], "reason": "length"}, "length", GOOD[:9]),
        ({"content": None, "reason": "content_filter"}, "content_filter", ""),
        ({"content": GOOD, "choices": []}, "not_a_completion", None),
        ({"content": GOOD, "choices": "?"}, "not_a_completion", None),
    ],
)
def test_a_chat_answer_that_is_not_five_grades_fails_with_its_text_and_reason(
    server: JudgeServer, reply: Any, reason: str, raw: str | None
) -> None:
    server.always(completion(**reply))
    result = server.ask_one()
    assert (result.scores, result.finish_reason) == (None, reason)
    assert result.raw == raw or (raw is None and '"choices"' in result.raw)
    assert server.asked.total() == 1


@pytest.mark.parametrize(
    ("api", "reply"),
    [
        ("chat", completion(QUOTED)),
        ("completions", text_completion(f"analysisNot sure.assistantfinal{GOOD}")),
    ],
)
def test_what_is_salvaged_is_of_another_scorer(server: JudgeServer, api: Any, reply: Any) -> None:
    server.always(reply)
    for extract_embedded, scores in ((False, None), (True, SCORES)):
        result = server.ask_one(api=api, extract_embedded=extract_embedded)
        assert (result.scores, result.is_salvaged) == (scores, extract_embedded)
    two = f"analysis: maybe {GOOD} and {OTHER}"
    server.always(text_completion(two) if api == "completions" else completion(two))
    result = server.ask_one(api=api, extract_embedded=True)
    assert (result.scores, result.is_salvaged) == (None, False)
    lenient = server.oracle(api=api, extract_embedded=True)
    assert lenient.facts["salvage"], "facts are hashed; they keep the earlier name of the setting"
    assert server.oracle(api=api).scorer != lenient.scorer


_CONTROL = st.sampled_from([200002, 200003, 200005, 200006, 200007, 200008, 200012, 173781, 17196])
_WORDS = st.sampled_from([GOOD, OTHER, "{", "}", "assistant", "final", "analysis"]).map(tokens_of)
_TOKENS = (_CONTROL | st.integers(0, 199997)).map(lambda token: [token]) | _WORDS


@settings(max_examples=200)
@given(st.lists(_TOKENS, max_size=30), st.booleans(), st.booleans())
def test_tokens_give_scores_or_a_reason(parts: list[list[int]], stop: bool, opened: bool) -> None:
    tokens = [token for part in parts for token in part]
    result = read_answer(tokens, stop, opened, extract_embedded=True)
    assert result.finish_reason in ("final_stop", "stop_outside_final", "length", "parser_error")
    assert result.scores in (None, SCORES, json.loads(OTHER))
    assert result.scores is None or result.raw == ""


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
    assert read_scores(text)[:2] == (SCORES if FENCES[text] else None, False)


_WRAPPERS = [
    *("<think>", "</think>", "<thinking>", "</thinking>", "<reasoning>", "[THINK]", "[/THINK]"),
    *("◁think▷", "◁/think▷", "<|channel|>", "analysis", "final", "<|message|>", "<|end|>"),
    *("<|start|>assistant", "assistantfinal", "assistantanalysis", "<final>", "</final>"),
    *("First guess", "maybe", "but wait,", "so I will not comply", "Answer:", "```", "```json\n"),
    *("\n", " ", "\\boxed{", "}", '"', "<answer>", "</answer>", "#### "),
]
_AROUND = st.lists(st.sampled_from(_WRAPPERS) | st.text(max_size=8), max_size=6).map("".join)


@settings(max_examples=400)
@given(_AROUND, _AROUND, st.lists(st.integers(0, 4), min_size=5, max_size=5))
def test_an_object_among_words_is_only_salvaged(before: str, after: str, grades: list[int]) -> None:
    scores = dict(zip(QUALITY.names, grades))
    text = before + json.dumps(scores) + after
    inside = text.strip(" \t\r\n").removesuffix("```").strip()
    is_fenced = inside.removeprefix("```json\n").removeprefix("```").strip() == json.dumps(scores)
    if not is_fenced:
        assert read_scores(text)[:2] == (None, False)
    if not {"{", "}"} & {*before, *after}:
        assert read_scores(text, True)[0] == scores
        assert read_scores(f"{text} {OTHER}", True)[:2] == (None, False)
    # The same as a completion in text: only a delimited final message is read.
    if FINAL not in text:
        assert final_text(text) is None
