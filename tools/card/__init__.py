"""The card of a model."""
