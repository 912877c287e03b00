"""Selection: all attributes of a run side by side, the documents that a rule keeps, questions in
SQL."""
