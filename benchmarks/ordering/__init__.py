"""Document orders against their targets: `python -m benchmarks.ordering`."""
