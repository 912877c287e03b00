"""Changes of a document's text before it is tokenised, each recorded so that it can be undone."""
