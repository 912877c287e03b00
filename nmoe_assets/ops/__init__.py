"""Jobs (one per task, the pipeline, retention of old runs), sensors and schedules."""
