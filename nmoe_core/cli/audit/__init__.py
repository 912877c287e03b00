"""Verbs that audit a run, and verbs that make a new plan from an existing one."""
