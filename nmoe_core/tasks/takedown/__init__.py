"""Tasks of a takedown: the report, the record, a plan that masks the documents, the proof."""
