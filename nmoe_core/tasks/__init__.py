"""The stages of a run: each reads the configuration, calls one piece of compute, reports.

This is the surface that Dagster assets and the command line share. A stage reads and writes files
under the run's root only, and does nothing when its fingerprints are current. Stages never call
one another.
"""
