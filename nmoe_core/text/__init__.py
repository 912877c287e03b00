"""Text to token ids: normalisation and tokenizers."""
