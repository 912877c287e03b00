"""Probe, judge and student: features, training, evaluation and files."""

# The versions of trainings. They are here because this package is imported without torch.
TRAIN_CODE = "train-heads/5"
STUDENT_CODE = "student/2"
PASS_TOKENS = 2**15  # of a pass of the judge in training
