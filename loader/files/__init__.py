"""Files: formats, checksums, tokens, document spans, and stores."""
