"""A new project: what a source holds, and the file that runs it."""
