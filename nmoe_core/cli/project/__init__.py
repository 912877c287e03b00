"""`nmoe init`: surveys the sources of a new project and writes its configuration."""
