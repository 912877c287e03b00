"""Files of token ids that other trainers' tools wrote, as sources of documents: one module per
format, which also has what the exports of `nmoe_core.shards.export` write."""
