"""`nmoe ablate`: trains small decoders on selected and other text, and compares their losses."""
