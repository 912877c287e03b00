"""The policies that choose the source of each sequence, and shuffling inside a source."""
