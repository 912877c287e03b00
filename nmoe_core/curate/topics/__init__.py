"""Embeddings, topic models and the topic of each document."""

# Versions of topic models and of assignment. They are defined here so that importing them imports
# no other code.
MODEL_FORMAT = "topic-model/2"
ASSIGN_CODE = "topics/1"
