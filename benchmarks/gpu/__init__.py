"""Figures of the engine on one GPU, each beside that GPU's own copy bandwidth and matrix rate."""
