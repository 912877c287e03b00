"""The record of documents that were taken down; curation leaves them out."""
