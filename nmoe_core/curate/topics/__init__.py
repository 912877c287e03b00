"""Embeddings, topic models and the topic of each document."""

# Versions of topic models and of assigning; reading them imports none of their code.
MODEL_FORMAT = "topic-model/2"
ASSIGN_CODE = "topics/1"
