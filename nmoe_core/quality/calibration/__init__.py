"""Thresholds fitted on the scores of the deployed heads, with certified bounds."""

# Version of the calibration code, defined in this module so that importing it does not import
# torch.
CALIBRATE_CODE = "calibrate/5"
