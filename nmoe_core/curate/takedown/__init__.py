"""The record of what was taken down, which curation honours."""
