"""Tasks of a takedown: report, record, masked plan, and proof."""
