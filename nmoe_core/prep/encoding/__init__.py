"""The documents of records: token ids of texts, or the tokens that a source has."""
