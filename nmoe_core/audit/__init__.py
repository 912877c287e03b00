"""Audits of a run: trace a document, search for a sentence, and prove a takedown."""
