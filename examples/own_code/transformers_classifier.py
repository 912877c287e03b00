"""An attribute by a text classifier of Hugging Face transformers, read from a directory.

[attributes.edu]
function = "transformers_classifier:classify"
path = "examples/own_code"
model = "models/classifier"             # config.json, model.safetensors, tokenizer.json
settings = { max_tokens = 512 }
packages = ["transformers", "torch"]
memory_gib = 16
columns = { label = "string", probability = "float" }
"""

from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer


@cache
def _loaded(path: Path):
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = AutoModelForSequenceClassification.from_pretrained(path, local_files_only=True)
    return tokenizer, model.eval()


@torch.inference_mode()
def classify(batch):
    """Label and probability of each text."""
    tokenizer, model = _loaded(batch.model)
    labels = []
    probabilities = []
    for text in batch.texts:  # one at a time: padding would change the last digits of the others
        most = batch.settings["max_tokens"]
        tokens = tokenizer(text, truncation=True, max_length=most, return_tensors="pt")
        found = model(**tokens).logits[0].double().softmax(0)
        best = int(found.argmax())
        labels.append(model.config.id2label[best])
        probabilities.append(float(found[best]))
    return {"label": labels, "probability": probabilities}
