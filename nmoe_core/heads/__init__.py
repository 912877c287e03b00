"""Probe and judge: features, training, evaluation and files."""
