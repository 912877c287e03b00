"""Help of the command line: examples, defaults, suggestions, shell completion, and progress."""
