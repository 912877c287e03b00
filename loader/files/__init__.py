"""Bytes on disk: formats, their integrity, tokens and document spans, text files."""
