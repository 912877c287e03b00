"""`nmoe generate`: a file of prompts, completed by a model."""
