"""Personal data and keys that are replaced in texts."""
