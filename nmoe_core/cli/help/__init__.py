"""How the command line helps: examples, defaults, near names, completion, and progress."""
