"""A small byte-level tokenizer with the special tokens of several families of chat models."""

import json
from pathlib import Path

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|eot_id|>"]
SPECIALS += ["<|end_header_id|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "[INST]"]


def write_chat_tokenizer(place: Path, vocab_size: int = 400) -> Path:
    """Write the files of a chat model's tokenizer to a directory; return the directory."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
        show_progress=False,
    )
    made.train_from_iterator(["user assistant system\n\n the weather of a city\n"] * 9, trainer)
    made.save(str(place / "tokenizer.json"))
    config = {"tokenizer_class": "TokenizersBackend", "bos_token": "<s>", "eos_token": "</s>"}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return place
