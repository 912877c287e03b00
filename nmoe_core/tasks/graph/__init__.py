"""The state of each output: the one place that decides whether it is current, and why not."""
