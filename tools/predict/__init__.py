"""Predictions of a model for images."""
