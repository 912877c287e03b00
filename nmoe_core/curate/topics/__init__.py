"""Embeddings, topic models and the topic of each document."""

# Versions of topic models and of assigning; code versions are made of them without what they run.
MODEL_FORMAT = "topic-model/2"
ASSIGN_CODE = "topics/1"
