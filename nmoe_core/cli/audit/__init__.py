"""The verbs of audits, and of plans made from plans."""
