"""Thresholds fitted on the scores of the deployed heads, with certified bounds."""

# Version of the calibration code. It is here so that it can be read without importing torch.
CALIBRATE_CODE = "calibrate/4"
