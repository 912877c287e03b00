"""The tasks of a run, one per asset: each reads the configuration and runs the computation.

Dagster assets and the command line share these functions. A task reads and writes only files under
the run's root, and does no work if the fingerprints of its output are current. A task does not call
another task.
"""
