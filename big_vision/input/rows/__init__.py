"""Sources of rows of numbers."""
