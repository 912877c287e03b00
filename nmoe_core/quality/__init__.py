"""Quality: heads, the calibration of their thresholds, and the grading of documents."""
