"""A model on two backends."""
