"""The tasks of a run, a task per asset: each reads the configuration and calls compute.

This is the surface that Dagster assets and the command line share. A task reads and writes files
under the run's root only, and does nothing when its fingerprints are current. Tasks never call
one another.
"""
