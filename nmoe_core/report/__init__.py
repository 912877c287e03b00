"""A run for people to look at: one page of HTML, a data card, and Croissant metadata."""
