"""Quality scores of all documents."""
