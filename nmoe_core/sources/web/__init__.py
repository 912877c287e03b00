"""Pages of the web: HTML files and web archives."""
