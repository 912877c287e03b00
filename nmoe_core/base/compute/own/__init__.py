"""Functions of the user's own, which run in a process with limits."""
