"""Attributes of the user's own: from files, and by functions."""
