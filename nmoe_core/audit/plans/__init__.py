"""Plans of live runs: continued under other shares, and searched for documents that did harm."""
