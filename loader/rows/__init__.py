"""From a plan to rows of tokens: the stream, windows, packing, buffers, prefetch."""
