"""Committed trees on object stores: sent there, and read and verified there."""
