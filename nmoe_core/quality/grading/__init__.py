"""Scores and decisions for all documents."""

# Version of the grading code: a change makes every grade stale. Importing this module does not
# import torch.
GRADE_CODE = "grade/2"
