"""Tests of the three packages, and what they share."""
