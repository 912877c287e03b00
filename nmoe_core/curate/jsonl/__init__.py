"""`nmoe curate` on JSONL files."""
