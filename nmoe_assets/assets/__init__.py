"""The assets: one module per part of the graph, and the events of their results."""
