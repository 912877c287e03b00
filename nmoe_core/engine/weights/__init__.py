"""Checkpoints: configuration, layout, files and quantised formats."""
