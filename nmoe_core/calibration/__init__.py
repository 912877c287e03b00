"""Thresholds fitted on the scores of the deployed heads, with certified bounds."""
