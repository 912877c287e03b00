"""`nmoe ablate`: what the choice of documents is worth, by small decoders trained on each arm."""
