"""An attribute by a fastText classifier: the most probable label of a text, and its probability.

pip install fasttext-numpy2-wheel

[attributes.topic]
function = "fasttext_classifier:classify"
path = "examples/own_code"
model = "models/topics.bin"             # of fasttext.train_supervised(...).save_model
packages = ["fasttext-numpy2-wheel"]    # another version makes the attribute again
columns = { label = "string", probability = "float" }
"""

from functools import cache
from pathlib import Path

import fasttext


@cache
def _model(path: Path):
    return fasttext.load_model(str(path))


def classify(batch):
    """Label and probability of each text."""
    model = _model(batch.model)
    # The library reads one line. Given a list, it gives the same: it classifies text by text.
    found = [model.predict(" ".join(text.split())) for text in batch.texts]
    return {
        "label": [labels[0].removeprefix("__label__") if labels else None for labels, _ in found],
        "probability": [float(values[0]) if len(values) else None for _, values in found],
    }
