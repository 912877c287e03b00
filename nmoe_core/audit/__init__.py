"""Audits: where a document went, where a sentence was read, and what was taken down."""
