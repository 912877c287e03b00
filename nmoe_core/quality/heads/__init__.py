"""Probe, judge and student: features, training, evaluation and files."""

# Versions of the training code, defined in this module so that importing them does not import
# torch.
TRAIN_CODE = "train-heads/7"
STUDENT_CODE = "student/3"
PASS_TOKENS = 2**15  # most padded tokens of one forward pass in training
