"""Takedown: the list of documents, the search for them, the record for curation, and the proof."""
