"""Checkpoints: their configuration, layout, files and quantised formats."""
