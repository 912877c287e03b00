"""Publishes committed trees to object stores, and reads and verifies them there."""
