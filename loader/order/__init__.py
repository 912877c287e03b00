"""Order of sequences: the policies that choose sources, shuffling and packing."""
