"""The state of each output: decides whether it is current and, if not, why."""
