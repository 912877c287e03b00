"""What is current: the one place that says it of each output, and why not."""
