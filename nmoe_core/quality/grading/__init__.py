"""Scores and decisions for all documents."""

# The version of grading: a change of it makes every grade stale. Imported without torch.
GRADE_CODE = "grade/2"
