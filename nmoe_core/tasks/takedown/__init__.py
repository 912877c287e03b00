"""Tasks of a takedown: report, record, plan with the documents masked, proof."""
