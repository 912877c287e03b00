"""Verbs that audit a run, and verbs that make a plan from a plan."""
