"""A new project: a survey of its sources, and the file that runs it."""
