"""Lines that are removed from texts by rules."""
