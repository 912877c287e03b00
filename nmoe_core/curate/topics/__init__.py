"""Embeddings, topic models and the topic of each document."""
