"""Probe, judge and student: features, training, evaluation and files."""

# Versions of the training code. They are here so that they can be read without importing torch.
TRAIN_CODE = "train-heads/5"
STUDENT_CODE = "student/2"
PASS_TOKENS = 2**15  # most padded tokens of one forward pass in training
