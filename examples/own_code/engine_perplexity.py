"""An attribute by the engine of this package: how well a checkpoint predicts a text.

It may be another checkpoint than that of `[backbone]`, whose perplexity is the attribute
`perplexity`.

[attributes.second_opinion]
function = "engine_perplexity:measure"
path = "examples/own_code"
model = "models/smollm2"                # a checkpoint of a family in docs/engine.md
settings = { max_tokens = 512 }
memory_gib = 16
columns = { bits_per_byte = "float", perplexity = "float" }
"""

from functools import cache
from pathlib import Path

from nmoe_core.engine import Transformer
from nmoe_core.engine.weights.weight_files import read_config
from nmoe_core.quality.states import Reader, perplexity
from nmoe_core.text.models import model_tokenizer
from nmoe_core.text.tokenizer import load_tokenizer


@cache
def _reader(path: Path, max_tokens: int):
    settings = model_tokenizer(path, read_config(path).vocab_size)
    if settings is None:
        raise FileNotFoundError(f"{path} has no tokenizer")
    tokenizer = load_tokenizer(settings)
    return Reader(Transformer.from_checkpoint(path), tokenizer, None, max_tokens)


def measure(batch):
    """Bits per byte and perplexity of each text; None for a text of one token."""
    reader = _reader(batch.model, batch.settings["max_tokens"])
    tokens = [reader.tokenizer.encode_long(text, reader.max_tokens) for text in batch.texts]
    found = [perplexity([ids], lambda count: None, reader=reader) for ids in tokens]
    names = ("bits_per_byte", "perplexity")
    return {name: [table.column(name)[0].as_py() for table in found] for name in names}
