"""Loops over the bytes of texts and the hashes of their words, compiled by numba."""
