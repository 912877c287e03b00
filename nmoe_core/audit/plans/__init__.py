"""Plans of live runs: change the mixture, and search for documents that caused harm."""
