"""The assets: one module per part of the graph, and how a piece of work becomes events."""
