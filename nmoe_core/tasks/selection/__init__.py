"""Selection: a view of all attributes, the documents that a rule keeps, and SQL queries."""
