"""What a run made: its summary, its account, its page and its data card."""
