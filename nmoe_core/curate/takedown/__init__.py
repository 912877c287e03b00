"""The record of documents that were taken down; curation excludes these documents."""
