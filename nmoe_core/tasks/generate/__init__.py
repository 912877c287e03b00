"""`nmoe generate`: completes a file of prompts."""
