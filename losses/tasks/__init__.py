"""Losses on targets: classes, yes or no, numbers, tokens."""
