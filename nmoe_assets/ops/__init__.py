"""Jobs: one per task, the pipeline over all of them, and retention of old runs."""
