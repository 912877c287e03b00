"""Prompts of chat models: messages to token ids by the model's own chat template."""
