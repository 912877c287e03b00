"""Copies among the documents of a run: whole documents, parts of others, and repeated passages."""
