"""Versions of the code that trains and calibrates, known without importing torch."""

TRAIN_CODE = "train-heads/3"
CALIBRATE_CODE = "calibrate/3"
