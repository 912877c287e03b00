"""Edits of a plan: other weights, masked documents, another tokenizer; and certificates of new
weights."""
