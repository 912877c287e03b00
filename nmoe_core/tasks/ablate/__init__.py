"""`nmoe ablate`: trains small decoders on kept, dropped and random text, and compares their
losses."""
