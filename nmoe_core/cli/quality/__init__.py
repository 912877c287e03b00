"""`nmoe hydra` and `nmoe train`: labels, heads, calibration and grades."""
