"""Sources of tokens."""
