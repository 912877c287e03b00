"""Probe and judge: features, training, evaluation and files."""

# The version of training. It lies here because this package is imported without torch.
TRAIN_CODE = "train-heads/4"
