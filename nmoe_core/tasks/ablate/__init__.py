"""`nmoe ablate`: the effect of data selection, measured by training small decoders on each arm."""
