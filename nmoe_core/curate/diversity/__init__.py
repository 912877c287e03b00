"""Measures how many topics the training windows of an order hold."""
