"""Building blocks of the report of a run: HTML and pictures."""
