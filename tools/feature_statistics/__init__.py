"""Statistics of teachers' features."""
