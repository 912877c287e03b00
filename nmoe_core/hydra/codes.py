"""Versions of the code that trains and calibrates, known without importing torch."""

TRAIN_CODE = "train-heads/2"
CALIBRATE_CODE = "calibrate/2"
