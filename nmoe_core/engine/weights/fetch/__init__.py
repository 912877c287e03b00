"""Fetches real models and converts them to the form that the engine reads."""
