"""Thresholds fitted on the scores of the deployed heads, with certified bounds."""

# The version of calibration. It is here because this package is imported without torch.
CALIBRATE_CODE = "calibrate/4"
