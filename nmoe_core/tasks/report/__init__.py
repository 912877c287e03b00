"""The report of a run: summary, account, HTML page and data card."""
