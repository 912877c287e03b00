"""Against what transformers computed: logits, hidden states, greedy continuations.

See tests/golden/engine/README.md. Of deliberate faults (test_faults.py) the gate's lower clamp
moves the logits least, by 3e-4: a tolerance above that would not see it.
"""

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from nmoe_core.engine import Transformer
from tests.core.engine.builders import HIDDEN_RTOL, LOGITS_ATOL
from tests.golden.engine.recipe import ids, prompts, relative, taps

ModelOf = Callable[[str], Transformer]
NAMES = ("tiny4", "deep24", "vocab201k")
# transformers' own bfloat16 against its float32, prompt by prompt: the median relative error of the
# logits over positions, and the relative error of the hidden states at a tap.
BFLOAT16_LOGITS = {
    "tiny4": (0.0119, 0.0150, 0.0217, 0.0216, 0.0191, 0.0242),
    "deep24": (0.0176, 0.0182, 0.0214, 0.0229),
    "vocab201k": (0.0091, 0.0141),
}
# Of vocab201k the logits of the last four positions at the ends and the special ids are stored.
STORED_COLUMNS = [0, 1, 199_998, 199_999, 200_002, *range(200_005, 200_009), 200_012, 201_087]
BFLOAT16_HIDDEN = {
    "tiny4": {},
    "deep24": {18: (0.0157, 0.0162, 0.0187, 0.0232), 24: (0.0199, 0.0210, 0.0248, 0.0303)},
    "vocab201k": {2: (0.0105, 0.0209)},
}


@pytest.fixture(scope="module")
def model_of(golden_checkpoint) -> ModelOf:
    """`model_of(name)`: the float32 model, loaded when first asked for."""
    return functools.cache(lambda name: Transformer.from_checkpoint(golden_checkpoint(name)))


@pytest.mark.parametrize(
    ("name", "n"), [(name, n) for name, count in zip(NAMES, (6, 4, 2)) for n in range(count)]
)
def test_goldens_equal_transformers(model_of: ModelOf, name: str, n: int):
    model, prompt = model_of(name), list(prompts(name))[n]
    logits, hidden = model(ids(prompt), return_hidden_states=taps(prompt))
    logits = logits[0]
    assert logits.argmax(-1).tolist() == prompt["argmax"].tolist()
    assert np.abs(logits.logsumexp(-1).numpy() - prompt["logsumexp"]).max() <= LOGITS_ATOL
    if name == "vocab201k":
        logits = logits[-4:, STORED_COLUMNS]
    assert np.abs(logits.numpy() - prompt["logits"]).max() <= LOGITS_ATOL
    for tap, states in hidden.items():
        assert relative(states[0], prompt[f"hidden_{tap}"]) <= HIDDEN_RTOL
    tokens = ids(prompt)
    for _ in prompt["greedy"]:  # every step computes the whole prefix again
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    assert tokens[0, len(prompt["ids"]) :].tolist() == prompt["greedy"].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_as_near_as_that_of_transformers(golden_checkpoint, name: str):
    """Medians over positions: near a router's tie another expert may be picked at some."""
    model = Transformer.from_checkpoint(golden_checkpoint(name), dtype=torch.bfloat16)
    for n, prompt in enumerate(prompts(name)):
        stored = BFLOAT16_HIDDEN[name]
        logits, hidden = model(ids(prompt), return_hidden_states=(1, *stored))
        assert logits.dtype == torch.float32
        if name == "vocab201k":
            logits = logits[:, -4:, STORED_COLUMNS]
        error = relative(logits[0], prompt["logits"], axis=-1)
        assert np.median(error) <= 1.5 * BFLOAT16_LOGITS[name][n]
        for tap, seen in stored.items():
            error = relative(hidden[tap][0], prompt[f"hidden_{tap}"], axis=-1)
            assert np.median(error) <= 1.5 * seen[n]
