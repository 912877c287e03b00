"""Selection: all attributes of a run side by side, what a rule keeps of them, questions in SQL."""
