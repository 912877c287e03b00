"""Takedown of documents: the list, their places, the record that curation honours, the proof."""
