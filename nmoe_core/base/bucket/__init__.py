"""A run's root in a bucket, and the local directory in which its files are read and written."""
