"""What a run has read, document by document, and what that did to its losses."""
