"""Edits of a plan: other weights, documents left out, another tokenizer; and their certificates."""
