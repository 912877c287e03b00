"""The tasks of a run, one per asset: each reads the configuration and calls compute.

This is the surface that Dagster assets and the command line share. A task reads and writes files
under the run's root only, and does no work when its fingerprints are current. Tasks never call one
another.
"""
