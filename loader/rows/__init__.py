"""Reads the rows of a plan: stream, windows, packing, buffers and prefetch."""
