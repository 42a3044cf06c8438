"""Regression on rows of numbers."""
