"""The assets: one module per room of the graph, and how a piece of work becomes events."""
