"""Documents that must go: the list, where they are, the record that curation honours, the proof."""
