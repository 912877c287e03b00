"""Loops over bytes of texts and hashes of words, compiled by numba."""
