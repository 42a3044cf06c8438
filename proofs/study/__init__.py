"""A study: rows that are trained over several seeds, and their table."""
